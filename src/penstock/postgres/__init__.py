"""Postgres: connections, catalog, publication, slot, replication stream, snapshots and the Postgres target.
Independent of Spark.
"""
