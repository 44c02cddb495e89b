"""`format("postgres-cdc")` as a user of Spark meets it, on every Spark that is supported."""
