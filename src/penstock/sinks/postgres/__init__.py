"""Tables in another Postgres database: COPY and merge, in one transaction with the position."""
