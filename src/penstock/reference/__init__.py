"""Reference tables: kept current beside a stream, and joined with it."""
