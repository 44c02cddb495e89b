"""The spool: captured transactions on disk as segments, each with one uncompressed Parquet file per table and
a manifest.

One capture writes it (`SpoolWriter` under `SpoolLock`). Any number of consumers read it (`SpoolReader`) and
release positions. Only a directory with a manifest is a segment, and a segment never splits a transaction.
"""

from __future__ import annotations

from penstock.spool.history import SchemaHistory, SchemaVersion
from penstock.spool.manifest import Manifest, SegmentFile
from penstock.spool.ownership import CaptureIdentity, SpoolLock, ensure_identity, load_identity
from penstock.spool.reader import FileSlice, SpoolRange, SpoolReader, TableRange
from penstock.spool.retention import (
    SegmentUsage,
    SpoolBudget,
    release,
    released_by_all,
    released_positions,
    remove_consumer,
    spool_bytes,
)
from penstock.spool.status import CaptureFailure, CaptureStatus, load_status, wait_for_end, write_status
from penstock.spool.writer import SpoolWriter

__all__ = [
    "CaptureFailure",
    "CaptureIdentity",
    "CaptureStatus",
    "FileSlice",
    "Manifest",
    "SchemaHistory",
    "SchemaVersion",
    "SegmentFile",
    "SegmentUsage",
    "SpoolBudget",
    "SpoolLock",
    "SpoolRange",
    "SpoolReader",
    "SpoolWriter",
    "TableRange",
    "ensure_identity",
    "load_identity",
    "load_status",
    "release",
    "released_by_all",
    "released_positions",
    "remove_consumer",
    "spool_bytes",
    "wait_for_end",
    "write_status",
]
