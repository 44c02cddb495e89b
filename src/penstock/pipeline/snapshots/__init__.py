"""Copies of tables: planned, read by executors, repaired, and put in the place of others."""
