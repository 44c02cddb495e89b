"""The spool: whole transactions on disk as segments, one uncompressed Parquet file per table and one manifest each.

Written by one capture (`SpoolWriter` under `SpoolLock`), read by any number of consumers (`SpoolReader`), who release what they no longer
need. Only a directory with a manifest is a segment, and a segment never splits a transaction.
"""

from __future__ import annotations

from penstock.spool.consumers import forget, minimum, release, released
from penstock.spool.history import SchemaHistory, SchemaVersion
from penstock.spool.identity import CaptureIdentity, ensure_identity, load_identity
from penstock.spool.lock import SpoolLock
from penstock.spool.manifest import Manifest, SegmentFile
from penstock.spool.range import FileSlice, SpoolRange, TableRange
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import spool_bytes
from penstock.spool.status import CaptureFailure, CaptureStatus, load_status, write_status
from penstock.spool.stock import SpoolBudget, SpoolStock
from penstock.spool.waiting import wait_for_end
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
    "SpoolBudget",
    "SpoolLock",
    "SpoolRange",
    "SpoolReader",
    "SpoolStock",
    "SpoolWriter",
    "TableRange",
    "ensure_identity",
    "forget",
    "load_identity",
    "load_status",
    "minimum",
    "release",
    "released",
    "spool_bytes",
    "wait_for_end",
    "write_status",
]
