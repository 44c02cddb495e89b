"""Postgres as a target: DDL, rows and state."""
