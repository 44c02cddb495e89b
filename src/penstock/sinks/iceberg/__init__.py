"""Iceberg tables: files of rows and of equality deletes, committed through Iceberg's own API."""
