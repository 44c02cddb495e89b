"""Transforms between source and target: drop, rename, hash, mask and cast columns, compute columns, filter
rows.
"""

from __future__ import annotations
