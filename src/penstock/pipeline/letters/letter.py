"""Dead letters: changes that were refused, as rows of a table that anybody can read.

A letter is known by its table and its change: the commit and the ordinal. It is open until it is settled, by a later change or by a replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum

import pyarrow as pa

from penstock.change import CHANGE_TYPE, COMMIT_TIMESTAMP, COMMIT_VERSION, ORDINAL, UNCHANGED
from penstock.pipeline.letters.screening import Name, Screened
from penstock.position import Position
from penstock.schema import TableName, TableSchema
from penstock.spark.envelope import to_envelopes

_TIME = pa.timestamp("us", "UTC")

LETTERS = pa.schema(
    [
        pa.field("table", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("code", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("change_type", pa.string(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("row", pa.string()),
        pa.field("unchanged", pa.list_(pa.string())),
        pa.field("position", pa.string(), nullable=False),
        pa.field("commit_version", pa.int64(), nullable=False),
        pa.field("ordinal", pa.int64(), nullable=False),
        pa.field("commit_timestamp", _TIME),
        pa.field("refused_at", _TIME, nullable=False),
        pa.field("settled_version", pa.int64()),
        pa.field("settled_at", _TIME),
    ]
)
"""`key` and `row` are JSON with every value exact, as the source's changes have them; `settled_version` is the commit that settled it."""


class LetterStatus(StrEnum):
    OPEN = "open"
    SUPERSEDED = "superseded"
    """The row was written anew, deleted, or copied anew: what the letter holds is no longer what the source has."""
    REPLAYED = "replayed"


def describe_letters(table: TableName, changes: pa.RecordBatch, schema: TableSchema, screened: Screened, refused_at: datetime) -> pa.Table:
    """The letters of `changes`, which are as they were spooled, and all of them refused. `table` is that of the pipeline."""
    refused, superseded = screened.refused, screened.superseded
    shown = to_envelopes(changes, schema)
    names = list(zip(shown.column(COMMIT_VERSION).to_pylist(), shown.column(ORDINAL).to_pylist(), strict=True))
    statuses = [LetterStatus.SUPERSEDED if name in superseded else LetterStatus.OPEN for name in names]
    columns: dict[str, object] = {
        "table": [str(table)] * len(names),
        "status": [status.value for status in statuses],
        "code": [refused[name].code for name in names],
        "reason": [refused[name].reason for name in names],
        "change_type": shown.column(CHANGE_TYPE),
        "key": shown.column("key"),
        "row": shown.column("after"),
        "unchanged": shown.column(UNCHANGED),
        "position": [str(Position.of(version)) for version, _ in names],
        "commit_version": shown.column(COMMIT_VERSION),
        "ordinal": shown.column(ORDINAL),
        "commit_timestamp": shown.column(COMMIT_TIMESTAMP),
        "refused_at": [refused_at] * len(names),
        "settled_version": [superseded.get(name) for name in names],
        "settled_at": [refused_at if name in superseded else None for name in names],
    }
    return pa.table(columns, schema=LETTERS)


def settled(letters: pa.Table, marks: Mapping[Name, tuple[LetterStatus, int]]) -> pa.Table:
    """The same letters, those that `marks` names and that are open with their new status."""
    rows, now = letters.to_pylist(), datetime.now(UTC)
    for row in rows:
        mark = marks.get((row["commit_version"], row["ordinal"]))
        if mark is not None and row["status"] == LetterStatus.OPEN:
            row["status"], row["settled_version"], row["settled_at"] = mark[0].value, mark[1], now
    return pa.Table.from_pylist(rows, LETTERS)
