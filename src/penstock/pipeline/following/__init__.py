"""Following the schema: what the log and the catalog show of tables that change."""
