"""Capture: reads changes from the source, by replication slot, polling or triggers, and writes them to a
spool.
"""
