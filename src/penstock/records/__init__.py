"""Record source: one record at a time from Postgres, for programs that store their own position."""
