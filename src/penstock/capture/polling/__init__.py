"""Capture by polling: periodic queries find changed rows."""
