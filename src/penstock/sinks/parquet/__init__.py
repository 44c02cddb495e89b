"""Directories of Parquet files, for append-only tables."""
