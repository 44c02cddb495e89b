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
    from penstock.capture.polling.capture import PollingCapture
    from penstock.capture.polling.settings import PollingSettings
    from penstock.capture.settings import CaptureSettings, PollingRules
    from penstock.capture.trigger.capture import TriggerCapture
    from penstock.capture.trigger.feed import TriggerSettings
    from penstock.capture.wal import WalCapture
    from penstock.connectors.postgres import PostgresConnector
    from penstock.pipeline.consistent import ConsistentTables, read_consistent
    from penstock.postgres.connection import SourceAddress
    from penstock.records.builder import RecordBuilder
    from penstock.records.reader import CaptureSnapshotter
    from penstock.records.source import PostgresRecordSource
    from penstock.records.stream import RecordBuffer
    from penstock.spark.datasource import register
    from penstock.spark.request import available_now

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(
    logging.NullHandler()
)  # without a handler, Python would print warnings to the standard error

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
    "CaptureSnapshotter": "penstock.records.reader",
    "ConsistentTables": "penstock.pipeline.consistent",
    "PollingCapture": "penstock.capture.polling.capture",
    "PollingRules": "penstock.capture.settings",
    "PollingSettings": "penstock.capture.polling.settings",
    "PostgresConnector": "penstock.connectors.postgres",
    "PostgresRecordSource": "penstock.records.source",
    "RecordBuffer": "penstock.records.stream",
    "RecordBuilder": "penstock.records.builder",
    "SourceAddress": "penstock.postgres.connection",
    "TriggerCapture": "penstock.capture.trigger.capture",
    "TriggerSettings": "penstock.capture.trigger.feed",
    "WalCapture": "penstock.capture.wal",
    "available_now": "penstock.spark.request",
    "read_consistent": "penstock.pipeline.consistent",
    "register": "penstock.spark.datasource",
}


def __getattr__(name: str) -> Any:
    # Spark and the database driver are imported only when they are used.
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    raise AttributeError(name)
