"""Capture by triggers, which write changes to a change table in the source."""
