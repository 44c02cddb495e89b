"""The logical replication protocol of Postgres's own output plugin, decoded many messages at a time. Pure: bytes in, Arrow out."""
