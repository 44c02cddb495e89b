"""Penstock: change data capture from Postgres into a lakehouse, on Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.contracts.capture import Ack, Change, ChangeCapture, Delete, Truncate, Upsert
from penstock.errors import PenstockError, Recovery
from penstock.position import Lsn, Position
from penstock.schema import TableName, TableSchema

if TYPE_CHECKING:
    from penstock.spark.datasource import register

__version__ = "0.1.0"

__all__ = [
    "Ack",
    "Change",
    "ChangeCapture",
    "Delete",
    "Lsn",
    "PenstockError",
    "Position",
    "Recovery",
    "TableName",
    "TableSchema",
    "Truncate",
    "Upsert",
    "__version__",
    "register",
]


def __getattr__(name: str) -> Any:
    # Spark is imported only by those who use it: the capture process and `penstock status` start without it.
    if name == "register":
        from penstock.spark.datasource import register

        return register
    raise AttributeError(name)
