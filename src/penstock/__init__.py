"""Penstock: change data capture from Postgres into a lakehouse, on Spark."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.contracts.capture import Ack, Change, ChangeCapture, Delete, Truncate, Upsert
from penstock.contracts.connector import SourceBatch, SourceCheckpoint, SourceConnector
from penstock.contracts.records import CdcIterator, Record, RecordPosition, RecordSource, Snapshotter
from penstock.errors import PenstockError, Recovery
from penstock.position import Lsn, Position
from penstock.schema import TableName, TableSchema

if TYPE_CHECKING:
    from penstock.capture.polling import PollingCapture
    from penstock.capture.polling_rules import PollingRules
    from penstock.capture.polling_settings import PollingSettings
    from penstock.capture.records.buffer import RecordBuffer
    from penstock.capture.records.building import RecordBuilder
    from penstock.capture.records.snapshotter import CaptureSnapshotter
    from penstock.capture.records.source import PostgresRecordSource
    from penstock.capture.settings import CaptureSettings
    from penstock.capture.trigger import TriggerCapture
    from penstock.capture.trigger_settings import TriggerSettings
    from penstock.capture.wal import WalCapture
    from penstock.connectors.postgres import PostgresConnector
    from penstock.pipeline.consistent import ConsistentTables, read_consistent
    from penstock.postgres.connection import SourceAddress
    from penstock.spark.available import available_now
    from penstock.spark.datasource import register

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())  # without a handler, Python would print warnings to the standard error

__all__ = [
    "Ack",
    "CaptureSettings",
    "CaptureSnapshotter",
    "CdcIterator",
    "Change",
    "ChangeCapture",
    "ConsistentTables",
    "Delete",
    "Lsn",
    "PenstockError",
    "PollingCapture",
    "PollingRules",
    "PollingSettings",
    "Position",
    "PostgresConnector",
    "PostgresRecordSource",
    "Record",
    "RecordBuffer",
    "RecordBuilder",
    "RecordPosition",
    "RecordSource",
    "Recovery",
    "Snapshotter",
    "SourceAddress",
    "SourceBatch",
    "SourceCheckpoint",
    "SourceConnector",
    "TableName",
    "TableSchema",
    "TriggerCapture",
    "TriggerSettings",
    "Truncate",
    "Upsert",
    "WalCapture",
    "__version__",
    "available_now",
    "read_consistent",
    "register",
]


_ELSEWHERE = {
    "CaptureSettings": "penstock.capture.settings",
    "CaptureSnapshotter": "penstock.capture.records.snapshotter",
    "ConsistentTables": "penstock.pipeline.consistent",
    "PollingCapture": "penstock.capture.polling",
    "PollingRules": "penstock.capture.polling_rules",
    "PollingSettings": "penstock.capture.polling_settings",
    "PostgresConnector": "penstock.connectors.postgres",
    "PostgresRecordSource": "penstock.capture.records.source",
    "RecordBuffer": "penstock.capture.records.buffer",
    "RecordBuilder": "penstock.capture.records.building",
    "SourceAddress": "penstock.postgres.connection",
    "TriggerCapture": "penstock.capture.trigger",
    "TriggerSettings": "penstock.capture.trigger_settings",
    "WalCapture": "penstock.capture.wal",
    "available_now": "penstock.spark.available",
    "read_consistent": "penstock.pipeline.consistent",
    "register": "penstock.spark.datasource",
}


def __getattr__(name: str) -> Any:
    # Spark and the database driver are imported only by those who use them.
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    raise AttributeError(name)
