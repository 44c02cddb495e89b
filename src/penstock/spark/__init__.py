"""Spark sessions, the data source `postgres-cdc`, and the control stream of a pipeline.

The only package with camelCase method names, because Spark's API defines them.
"""
