"""Contracts of captures, connectors, reference tables and record sources: abstract classes and values, no
I/O.
"""
