"""From the events of a capture to records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from penstock.capture.records.places import ChangePlace
from penstock.contracts.capture import Change, Commit, Delete, Truncate, Upsert
from penstock.contracts.records import EXACT, MOVED_FROM, OPERATION, TABLE, UNCHANGED, Operation, Record, RecordPosition
from penstock.errors import ConfigError
from penstock.schema import TableName


@dataclass(frozen=True, slots=True)
class RecordBuilder:
    """Makes the records of one table, with some of its columns, or all if none are named."""

    table: TableName
    columns: tuple[str, ...] = ()

    def row(self, event: Upsert, operation: Operation, position: RecordPosition, time: datetime) -> Record:
        self._check_columns(event)
        metadata: dict[str, object] = {OPERATION: operation.value, TABLE: str(self.table)}
        if unchanged := [name for name in sorted(event.unchanged) if self._wants(name)]:
            metadata[UNCHANGED] = unchanged
        if exact := self._chosen(event.exact):
            metadata[EXACT] = exact
        if event.moved_from is not None:
            metadata[MOVED_FROM] = dict(event.moved_from)
        return Record(position, event.key, self._chosen(event.row), metadata, time)

    def record(self, change: Change) -> Record:
        """Of a change of the live stream, with the position that it has whenever it comes."""
        position, time = place_of(change).render(), commit_of(change).time or datetime.now(UTC)
        event = change.event
        match event:
            case Upsert():
                return self.row(event, Operation.UPSERT, position, time)
            case Delete():
                return Record(position, event.key, None, {OPERATION: Operation.DELETE.value, TABLE: str(self.table)}, time)
            case Truncate():
                return Record(position, {}, None, {OPERATION: Operation.TRUNCATE.value, TABLE: str(self.table)}, time)

    def _wants(self, column: str) -> bool:
        return not self.columns or column in self.columns

    def _chosen(self, values: Mapping[str, object]) -> dict[str, object]:
        return {name: value for name, value in values.items() if self._wants(name)}

    def _check_columns(self, event: Upsert) -> None:
        lacking = [name for name in self.columns if name not in event.row and name not in event.unchanged]
        if lacking:
            raise ConfigError(
                f"{self.table} has no column by the name {', '.join(lacking)}", hint=f"the table has {', '.join(sorted(event.row))}"
            )


def commit_of(change: Change) -> Commit:
    """Which commit it belongs to; positions are made of that."""
    if change.commit is None:
        raise _unplaced("which commit a change belongs to")
    return change.commit


def place_of(change: Change) -> ChangePlace:
    commit = commit_of(change)
    if commit.ordinal is None:
        raise _unplaced("which place a change has in its commit")
    return ChangePlace(commit.position, commit.ordinal)


def _unplaced(what: str) -> ConfigError:
    return ConfigError(f"the capture does not say {what}, and without that its records have no position", hint="use a WalCapture")
