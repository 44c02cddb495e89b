"""Verify: compare source and target at one position."""
