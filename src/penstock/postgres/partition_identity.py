"""Replica identities of partitions, compared with what the stream announces for their root.

With `publish_via_partition_root` a Relation message describes the root and flags the root's key, but each partition logs old keys by its
own replica identity. Where that lacks a column of the root's key, a delete arrives with NULL in it, and an update that changes only that
column arrives without any old key: no reader can tell which row it replaces.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import PartitionIdentityError
from penstock.postgres.connection import Connection
from penstock.postgres.queries import identifier, query
from penstock.schema import TableName


@dataclass(frozen=True, slots=True)
class PartitionMismatch:
    """A partition that does not log what identifies the rows of its root; or the root, if whole old rows are asked for."""

    root: TableName
    partition: TableName
    announced: tuple[str, ...]
    """The root's key in the stream; empty if there is none, so that only whole rows identify its rows."""
    logged: tuple[str, ...]
    """The columns of the partition's old keys."""
    identity: str
    """What the partition needs, as ALTER TABLE … REPLICA IDENTITY takes it."""

    @property
    def fix(self) -> str:
        """The statement that makes the partition log it."""
        return f"ALTER TABLE {identifier(self.partition.schema, self.partition.name)} REPLICA IDENTITY {self.identity};"


def inspect_partition_identities(
    connection: Connection, tables: Collection[TableName], *, old_rows: bool = False
) -> list[PartitionMismatch]:
    """The partitions of `tables` that do not log what their root's rows are identified by, in name order; one statement.

    With `old_rows`, whole old rows are asked for: a table of which the root or a partition has FULL needs it on all of them.
    """
    wanted = sorted(set(tables))
    parameters = {"schemas": [table.schema for table in wanted], "names": [table.name for table in wanted], "whole": old_rows}
    rows: list[Any] = connection.execute(query("publication", "partition_identities"), parameters).fetchall() if wanted else []
    return [_mismatch(row) for row in rows]


def describe_mismatches(mismatches: Sequence[PartitionMismatch]) -> str:
    """What is wrong with partitions of one table."""
    first = mismatches[0]
    needed = "whole old rows" if first.identity == "FULL" else _columns(first.announced)
    parts = "; ".join(map(_describe, mismatches))
    return f"old rows of table {first.root} are identified by {needed}, and {parts}: deletes and updates would miss their rows"


def _describe(mismatch: PartitionMismatch) -> str:
    if mismatch.partition == mismatch.root:
        return f"the table itself announces {_columns(mismatch.logged)}"
    return f"partition {mismatch.partition} logs {_columns(mismatch.logged)}"


def check_partition_identities(connection: Connection, tables: Collection[TableName], *, old_rows: bool = False) -> None:
    """Raise for the first of `tables` that has such partitions."""
    found = inspect_partition_identities(connection, tables, old_rows=old_rows)
    own = [each for each in found if each.root == found[0].root]
    if own:
        raise PartitionIdentityError(describe_mismatches(own), hint=" ".join(each.fix for each in own))


def _columns(names: Sequence[str]) -> str:
    return f"({', '.join(map(identifier, names))})"


def _mismatch(row: Any) -> PartitionMismatch:
    root_schema, root_name, root_identity, schema, name, announced, logged, index = row
    identity = "FULL"
    if not set(announced) <= set(logged) and index is not None:
        # Where the root has FULL, so that the primary key is what the stream is keyed by, FULL is what the owner wanted.
        identity = {"i": f"USING INDEX {identifier(index)}", "d": "DEFAULT"}.get(root_identity, "FULL")
    return PartitionMismatch(TableName(root_schema, root_name), TableName(schema, name), tuple(announced), tuple(logged), identity)
