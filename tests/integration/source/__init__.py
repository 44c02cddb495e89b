"""`format("postgres-cdc")` as users of Spark call it, on every supported Spark."""
