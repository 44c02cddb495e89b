"""Measurements. Each module is run by itself, and compares contenders within one run on one machine."""
