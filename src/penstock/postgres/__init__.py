"""The source: connections, catalog, publication, slot, the replication stream and snapshots. Nothing here knows Spark."""
