"""Postgres text to Arrow: one decoder for the snapshot's text columns and for the stream's tuples."""
