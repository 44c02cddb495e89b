"""Spark: sessions and the streaming source.

The only package that speaks camelCase, because Spark's own API does.
"""
