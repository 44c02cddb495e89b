"""Decode Postgres text to Arrow: the same decoders for a snapshot's columns and the stream's tuples."""
