"""Tables in another Postgres: copied and merged in one transaction with the position."""
