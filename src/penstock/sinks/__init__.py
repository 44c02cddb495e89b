"""Sinks: write targets. A sink commits a table's data and its position in one commit."""
