"""Detect partitions that were attached with rows, detached, dropped, rewritten or truncated.

The WAL does not show these operations, so the result of each catalog query is compared with that of the
previous query. The state directory stores the result of the previous query: which partitions each table had,
the file of each partition's rows, and a transaction id that marks the time of the query. If a partition is
missing, the table lost the partition's rows. If a new partition was a separate table before, the table gained
the partition's rows. If the file of a partition changed, the partition was rewritten or truncated. If the
state directory is lost, changes since the last query are not detected.

A TRUNCATE of the whole table changes the files too. It is not reported, because it is in the WAL. It is
recognised by its transaction, which was the last to write the partition's catalog row. So a changed file is
reported only when epochs have applied everything that was committed before the query.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from penstock import storage
from penstock.errors import SpoolCorruptError
from penstock.pipeline.retries import check_format
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.chunks import Partition, Partitions, has_older_row, inspect_parts
from penstock.postgres.connection import Connection
from penstock.schema import TableName

_FILE = "parts.json"
_FORMAT = 2
DETACHED = "a partition with rows was detached or dropped"
ATTACHED = "a partition with rows was attached"


@dataclass(frozen=True, slots=True)
class KnownPartitions:
    """The partitions that a table had when the catalog was read."""

    filenodes: Mapping[int, int]
    """The file of each partition's rows (relfilenode), by partition OID; 0 if it was not recorded."""
    mark: int
    """All transactions with a lower id had ended when the partitions were read."""

    @classmethod
    def of(cls, parts: Partitions) -> KnownPartitions:
        return cls({oid: part.filenode for oid, part in parts.leaves.items()}, parts.mark)


def moved_partitions(
    known: Mapping[TableName, KnownPartitions], now: Mapping[TableName, Partitions]
) -> dict[TableName, str]:
    """Return the tables that gained or lost rows through partitions since `known` was recorded, each with the
    reason.
    """
    moved: dict[TableName, str] = {}
    for name, parts in now.items():
        before = known.get(name)
        if before is not None and before.filenodes.keys() - parts.leaves.keys():
            moved[name] = DETACHED
        elif before is not None and any(
            part.is_attached for oid, part in parts.leaves.items() if oid not in before.filenodes
        ):
            moved[name] = ATTACHED
    return moved


def changed_files(known: KnownPartitions, now: Partitions) -> dict[int, Partition]:
    """Return the partitions whose rows are now in another file, because they were rewritten or truncated. If
    `known` lacks a partition, its OID is taken as its earlier file number, because a new partition has that
    number.
    """
    return {
        oid: part
        for oid, part in now.leaves.items()
        if known.filenodes.get(oid, oid) not in (0, part.filenode)
    }


def load_partitions(state: Path) -> dict[TableName, KnownPartitions]:
    """Load the partitions of each table as the last catalog query found them. Empty before the first
    query.
    """
    data = storage.read(state / _FILE)
    if data is None:
        return {}
    try:
        document = json.loads(data)
        check_format(document, _FORMAT, state / _FILE)
        return {TableName.parse(name): _parse(parts) for name, parts in document["tables"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        hint = (
            "remove the file if no partition has been attached, detached, dropped or emptied since the "
            "last run"
        )
        raise SpoolCorruptError(f"{state / _FILE} has invalid content", hint=hint) from error


def _parse(parts: Any) -> KnownPartitions:
    if isinstance(parts, list):  # format 1 has the partitions at the top level
        return KnownPartitions({int(oid): 0 for oid in parts}, 0)
    return KnownPartitions(
        {int(oid): int(filenode) for oid, filenode in parts["filenodes"].items()}, int(parts["mark"])
    )


def save_partitions(state: Path, parts: Mapping[TableName, KnownPartitions]) -> None:
    """Write the partitions, unless the file already has this content."""
    if load_partitions(state) != parts:
        tables = {
            str(name): {"mark": each.mark, "filenodes": dict(sorted(each.filenodes.items()))}
            for name, each in sorted(parts.items())
        }
        storage.put(state / _FILE, json.dumps({"format": _FORMAT, "tables": tables}).encode())


EMPTIED = "a partition was truncated separately, or rewritten"

Ask = Callable[[int, Partition], bool | None]
"""Function that returns whether a partition has a row that is older than its current file; None if the
partition cannot be queried now. Its arguments are the partition's OID and the partition.
"""


class Verdict(StrEnum):
    KEPT = "kept"
    EMPTIED = "emptied"
    BUSY = "busy"
    """The partition could not be read. The next catalog query tries again."""


def judge(known: KnownPartitions, now: Partitions, truncates: Collection[int], ask: Ask) -> Verdict:
    """Decide whether a partition of a table was rewritten or truncated separately. `truncates` are the
    transactions in which the WAL showed a TRUNCATE of the table.
    """
    for oid, part in changed_files(known, now).items():
        if part.xid not in truncates and not (is_kept := ask(oid, part)):
            return Verdict.BUSY if is_kept is None else Verdict.EMPTIED
    return Verdict.KEPT


class PartitionWatch:
    """Finds tables that gained or lost rows through partitions. Used by the pipeline's main thread only.
    Every query finds such a table again until the table's resync has been ordered.
    """

    def __init__(
        self,
        state: Path,
        truncates: Callable[[TableName], Collection[int]],
        auto_resyncs: Callable[[TableName], bool],
    ) -> None:
        """`truncates` returns the transactions in which the WAL showed a TRUNCATE of a table, as the low 32
        bits of their ids. `auto_resyncs` returns whether a table is resynced automatically.
        """
        self._state = state
        self._truncates = truncates
        self._auto_resyncs = auto_resyncs
        self._since: dict[TableName, Position] = {}
        self._copied: frozenset[TableName] = frozenset()
        """Tables that were being copied at the last query. Until epochs apply changes to them, they are
        compared with the partitions that they had at the start of the copy.
        """
        self.open: frozenset[TableName] = frozenset()
        """Tables with a changed file that can be judged only after later epochs, and tables that need a
        resync which is not ordered yet.
        """

    def find_moved(
        self,
        connection: Connection,
        tables: Mapping[TableName, CatalogTable],
        applied: Mapping[TableName, Position | None],
        paused: Collection[TableName],
        seen: Callable[[], Position | None],
        *,
        finds_deletes: bool,
    ) -> dict[TableName, str]:
        """Return the tables among `applied` that gained or lost rows through partitions, each with the
        reason. `applied` has the applied position of each table.

        Tables in `paused` are checked after they are resumed. `seen` returns a position at or after
        everything committed so far; None if such a position is not known now. With `finds_deletes`, changed
        files are not checked, because the capture itself reports missing rows as deletes.
        """
        sources = {name: [source.oid for source in table.sources] for name, table in tables.items()}
        known = load_partitions(self._state)
        parts = inspect_parts(connection, sources, {oid for each in known.values() for oid in each.filenodes})
        moved = {name: reason for name, reason in moved_partitions(known, parts).items() if name in applied}
        waits, busy = set[TableName](), {name for name in paused if name in known}
        for name in (applied.keys() & known.keys() & parts.keys()) - moved.keys():
            verdict = (
                Verdict.KEPT if finds_deletes else self._judge(connection, name, known[name], parts[name])
            )
            if verdict is Verdict.KEPT:
                continue
            if verdict is Verdict.BUSY or (since := self._since.get(name) or seen()) is None:
                busy.add(name)
            elif (at := applied[name]) is None or at < since:
                waits.add(name)
                self._since[name] = since  # the first position, which a busy table can reach
            else:
                moved[name] = EMPTIED
        self.open = frozenset(waits | {name for name in moved if self._auto_resyncs(name)})
        self._since = {name: at for name, at in self._since.items() if name in waits}
        copied = parts.keys() - applied.keys() - set(paused)
        kept = self.open | busy | (copied & self._copied & known.keys())
        self._copied = frozenset(copied)
        save_partitions(
            self._state,
            {name: known[name] if name in kept else KnownPartitions.of(each) for name, each in parts.items()},
        )
        return moved

    def _judge(
        self, connection: Connection, name: TableName, known: KnownPartitions, now: Partitions
    ) -> Verdict:
        return judge(
            known,
            now,
            self._truncates(name),
            lambda oid, part: has_older_row(connection, oid, part.root, known.mark),
        )
