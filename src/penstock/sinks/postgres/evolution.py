"""A Postgres target's columns as they become: which of them are renamed, hold more, or are added. Pure.

The server does to the target what it did to the source: a wider type holds the same values there, and a default of a column that is added
is that of all rows that were there. Values of earlier shapes in the same epoch are copied as they were written, so they must be written in
the type of today as they were then; a `real` is not written like the `double precision` that it became.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.postgres.applied import AppliedRecord, TargetColumn
from penstock.postgres.target_ddl import Alteration
from penstock.postgres.types.builtin import BUILTIN_TYPES
from penstock.sinks.evolution import Evolution
from penstock.sinks.origin import Origin
from penstock.sinks.postgres.rows import target_column

_WRITTEN_ALIKE = tuple(frozenset(BUILTIN_TYPES[name][0] for name in kind) for kind in (("int2", "int4", "int8"), ("text", "varchar")))


def evolved_record(record: AppliedRecord, evolution: Evolution) -> AppliedRecord:
    """What is known of the table from then on. Columns that the source no longer has keep the types that they had."""
    known = {evolution.renamed.get(column.name, column.name): column for column in record.columns}
    held = _held(evolution.origin)
    columns = tuple(held.get(name) or replace(known[name], name=name) for name in evolution.columns.names)
    return replace(record, columns=columns, key=evolution.key, origin=str(evolution.origin))


def _held(origin: Origin) -> dict[str, TargetColumn]:
    columns = [column for column in origin.columns.values() if column.target is not None]
    return {str(each.target): target_column(str(each.target), each.type_oid, each.type_modifier) for each in columns}


def plan_alteration(record: AppliedRecord, evolution: Evolution) -> Alteration:
    """From what `record` says of the table."""
    columns = {column.name: column for column in evolved_record(record, evolution).columns}
    kept = [replace(column, name=evolution.renamed.get(column.name, column.name)) for column in record.columns]
    return Alteration(
        dict(evolution.renamed),
        tuple(columns[column.name] for column in kept if columns[column.name] != column),
        tuple(columns[added.name] for added in evolution.added),
        tuple(added.fill.as_py() for added in evolution.added),
    )


def is_written_alike(record: AppliedRecord, evolution: Evolution) -> bool:
    """Whether every value of an earlier shape is written as the types of today read it."""
    columns = {column.name: column for column in evolved_record(record, evolution).columns}
    return all(
        _is_alike(column.type_oid, columns[target].type_oid)
        for version, view in evolution.views.items()
        for column in version.columns
        if (target := view.names.get(column.name)) is not None
    )


def _is_alike(before: int, after: int) -> bool:
    """Whatever is not built in is text in the target, of which the type is 0."""
    return before == after or not after or any(before in kind and after in kind for kind in _WRITTEN_ALIKE)
