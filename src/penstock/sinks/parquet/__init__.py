"""Directories of Parquet files, for tables that are only ever appended to."""
