"""The smallest implementation of the reference table contract: a list of transactions, and the number of
delivered transactions.

`Ledger` represents the source; everything else may be lost at any time. Run it to see a table kept current,
or use it as a template for your own reference table: `tests/contract/test_list_reference.py` runs
`ReferenceTableConformance` against it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from typing_extensions import override

from penstock.change import ChangeType
from penstock.contracts.capture import Delete, Event, Truncate, Upsert
from penstock.contracts.connector import SourceCheckpoint
from penstock.contracts.reference import ReferenceTableSource, as_changes, as_truncate
from penstock.errors import CheckpointError, ConnectionLostError, ConnectorStateError
from penstock.schema import TableName

COLUMNS = pa.schema([pa.field("id", pa.int64()), pa.field("note", pa.string())])
BATCH_ROWS = 10


class Ledger:
    """Committed transactions, in order. The version of a transaction is its number, counted from 1."""

    def __init__(self) -> None:
        self.transactions: list[tuple[Event, ...]] = []
        self.is_shut = False
        """Whether the ledger is currently unreadable."""

    def commit(self, *events: Event) -> None:
        self.transactions.append(events)

    def rows_at(self, version: int) -> list[dict[str, object]]:
        rows: dict[object, dict[str, object]] = {}
        for event in (event for events in self.transactions[:version] for event in events):
            match event:
                case Upsert():
                    rows[event.key["id"]] = dict(event.row)
                case Delete():
                    rows.pop(event.key["id"], None)
                case Truncate():
                    rows.clear()
        return list(rows.values())


class ListReference(ReferenceTableSource):
    """A ledger as a reference table."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._version: int | None = None
        """The number of completely delivered transactions; None while the snapshot is not complete."""
        self._snapshot: Iterator[pa.RecordBatch] | None = None
        self._fence = 0
        self._waiting: list[pa.RecordBatch] = []
        self._is_closed = False

    @override
    def schema(self) -> pa.Schema:
        return COLUMNS

    @override
    def key(self) -> tuple[str, ...]:
        return ("id",)

    @override
    def poll_snapshot(self) -> pa.RecordBatch | None:
        self._check_open()
        if self._version is not None:
            return None
        self._check_readable()
        if self._snapshot is None:
            self._fence = len(self._ledger.transactions)
            self._snapshot = batches(self._ledger.rows_at(self._fence), ChangeType.SNAPSHOT, self._fence)
        batch = next(self._snapshot, None)
        if batch is None:
            self._version = self._fence
        return batch

    @override
    def is_snapshot_complete(self) -> bool:
        return self._version is not None

    @override
    def poll_changes(self) -> pa.RecordBatch | None:
        self._check_open()
        if self._version is None:
            raise ConnectorStateError("the snapshot is not complete")
        try:
            self._check_readable()
        except ConnectionLostError:
            self._waiting = []  # the delivered part of a transaction is delivered again
            raise
        if not self._waiting and self._version < len(self._ledger.transactions):
            self._waiting = list(changes(self._ledger.transactions[self._version], self._version + 1))
        if not self._waiting:
            return None
        batch = self._waiting.pop(0)
        if not self._waiting:
            self._version += 1
        return batch

    @override
    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint(
            {} if self._version is None else {"version": str(self._version)}, self._version or 0
        )

    @override
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        self._check_open()
        if self._snapshot is not None or self._version is not None:
            raise ConnectorStateError("reading has begun")
        if checkpoint.offsets:
            try:
                self._version = int(checkpoint.offsets["version"])
            except (KeyError, ValueError) as error:
                raise CheckpointError(
                    "the checkpoint is not one of a ledger", hint="start without it"
                ) from error

    @override
    def close(self) -> None:
        self._is_closed = True

    def _check_readable(self) -> None:
        if self._ledger.is_shut:
            raise ConnectionLostError("the ledger is shut")  # recovery is RETRY: poll again

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConnectorStateError("the reference table is closed")


def batches(
    rows: list[dict[str, object]], kind: ChangeType, version: int, ordinal: int = 0
) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(rows), BATCH_ROWS):
        part = pa.RecordBatch.from_pylist(rows[start : start + BATCH_ROWS], COLUMNS)
        yield as_changes(part, kind, version, ordinal + start)


def changes(events: tuple[Event, ...], version: int) -> Iterator[pa.RecordBatch]:
    for ordinal, event in enumerate(events):
        match event:
            case Upsert():
                yield from batches([dict(event.row)], ChangeType.UPDATE_POSTIMAGE, version, ordinal)
            case Delete():
                yield from batches(
                    [{"id": event.key["id"], "note": None}], ChangeType.DELETE, version, ordinal
                )
            case Truncate():
                yield as_truncate(COLUMNS, version, ordinal)


def main() -> None:
    ledger, table = Ledger(), TableName("public", "notes")
    ledger.commit(Upsert(table, {"id": 1}, {"id": 1, "note": "one"}))
    with ListReference(ledger) as reference:
        while (batch := reference.poll_snapshot()) is not None:
            print("snapshot", batch.select(COLUMNS.names).to_pylist())
        ledger.commit(Upsert(table, {"id": 2}, {"id": 2, "note": "two"}), Delete(table, {"id": 1}))
        while (batch := reference.poll_changes()) is not None:
            print(batch.column("_change_type")[0].as_py(), batch.select(COLUMNS.names).to_pylist())
        print("to go on from:", reference.checkpoint().to_json())


if __name__ == "__main__":
    main()
