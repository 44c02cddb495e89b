"""Partitions that hold rows themselves: where their rows lie, and whether these are still those that lay there before.

A TRUNCATE of a single partition is in no log that is published by its root. It puts the partition elsewhere (another filenode), and so
does whoever rewrites it. But VACUUM FULL and CLUSTER keep rows as they are, with the number of the transaction that wrote each; and all
rows that come after a TRUNCATE are by transactions that had not ended before it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from penstock.errors import TableRewrittenError
from penstock.postgres.catalog import inspect_names
from penstock.postgres.chunks import lock_table
from penstock.postgres.connection import Connection, refuse_views
from penstock.postgres.queries import query
from penstock.schema import TableName

_OIDS = 1 << 32
_PATIENCE = ("SET LOCAL lock_timeout = '200ms'", "SET LOCAL statement_timeout = '5s'")


@dataclass(frozen=True, slots=True)
class Part:
    root: int
    """Of the table that it is a part of."""
    filenode: int
    xid: int
    """32 bits of the transaction that was the last to write about it in the catalog: that put it where it is, or a later one."""
    is_attached: bool = False
    """Whether it was a table with rows before."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one table, by OID, at one moment."""

    leaves: Mapping[int, Part]
    mark: int
    """Every transaction before this one had ended by then."""


def inspect_parts(
    connection: Connection, sources: Mapping[TableName, Collection[int]], known: Collection[int] = ()
) -> dict[TableName, Parts]:
    """Of the tables that are partitioned, or made of tables that are; `sources` are the OIDs of what each consists of.

    Parts that are `known` are not asked whether they were tables before, for which one has to wait while somebody has them to himself.
    """
    found: dict[int, dict[int, Part]] = {}
    wanted = [oid for oids in sources.values() for oid in oids if oid < _OIDS]
    rows: list[Any] = connection.execute(query("parts", "leaves"), {"oids": wanted, "known": list(known)}).fetchall() if wanted else []
    for root, oid, filenode, xid, is_attached, _ in rows:
        found.setdefault(root, {})[oid] = Part(root, filenode, xid, is_attached)
    leaves = {name: {oid: part for root in oids for oid, part in found.get(root, {}).items()} for name, oids in sources.items()}
    return {name: Parts(parts, rows[0][-1]) for name, parts in leaves.items() if parts}


def has_older_row(connection: Connection, leaf: int, root: int, mark: int) -> bool | None:
    """Whether a part has a row that was written before `mark`: it was not emptied since then.

    False also if that cannot be found out: by the rights on part and root, or in a few seconds. None: somebody has the part to himself.
    """
    names = inspect_names(connection, [leaf, root])
    refuse_views(connection)
    for oid in (leaf, root):  # whoever may read a table may do so by its root, but perhaps not a part alone
        heap = names.get(oid)
        if heap is None:
            return None
        statement = sql.SQL(query("parts", "older_row")).format(heap=sql.Identifier(heap.schema, heap.name))
        try:
            with connection.transaction():
                for setting in _PATIENCE:
                    connection.execute(setting)
                lock_table(connection, heap, oid, only=False)
                return connection.execute(statement, {"leaf": leaf, "mark": mark}).fetchone() is not None
        except (psycopg.errors.LockNotAvailable, psycopg.errors.UndefinedTable, TableRewrittenError):
            return None
        except psycopg.errors.QueryCanceled:
            return False
        except psycopg.errors.InsufficientPrivilege:
            continue
    return False
