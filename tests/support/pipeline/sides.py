"""Compare many small tables with their targets in this process; `verify` takes seconds for each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from penstock.config.model import PipelineConfig
from penstock.schema import TableName
from penstock.sinks.base import Sink
from penstock.sinks.delta.sink import DeltaSink
from penstock.sinks.modes import CURRENT, DELETED, Mode
from tests.support.delta_tables import files_of, read_all
from tests.support.fix_pipeline import Mirror
from tests.support.fix_postgres import Database

Rows = Counter[tuple[str | None, ...]]
"""The rows as texts, in the order of the source's columns."""

_COLUMNS = (
    "SELECT attname::text FROM pg_attribute "
    "WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
)
_KEY = """
    SELECT a.attname::text
    FROM pg_index i
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
    WHERE i.indrelid = %s::regclass AND i.indisprimary
"""
_MEMBERS = "SELECT relname::text FROM pg_class WHERE relname ~ %s AND relkind = 'r' ORDER BY 1"
_Live = tuple[str, bool]
_LIVE = {Mode.SOFT_DELETE: (DELETED, False), Mode.HISTORY: (CURRENT, True)}
_MASKED = {"a": "left(a, 1) || '***'"}
"""Columns that are masked except for their first letter."""


@dataclass(frozen=True)
class Sides:
    source: Rows
    target: Rows | None
    """None: the target is missing, or lacks columns."""
    key: frozenset[str]
    target_key: frozenset[str]

    @property
    def are_equal(self) -> bool:
        return self.source == self.target and self.key == self.target_key


def sides(lake: Mirror, database: Database, names: Iterable[str]) -> dict[str, Sides]:
    """A table of the schema lake consists of the tables of public with its name and a number."""
    config = lake.config
    found = {
        name: _source(database, name, is_masked=config.transform_of(TableName.parse(name)) is not None)
        for name in sorted(names)
    }
    sink = lake.open_sink()  # needed by some DataFrames while they are read
    keys = {
        str(each.table): frozenset(each.key)
        for name in found
        if (each := sink.load_target(TableName.parse(name)))
    }
    targets = _targets(
        sink, config, {name: columns for name, (columns, _, _) in found.items() if name in keys}
    )
    return {
        name: Sides(rows, targets.get(name), key, keys.get(name, frozenset()))
        for name, (_, rows, key) in found.items()
    }


def _source(database: Database, name: str, *, is_masked: bool) -> tuple[list[str], Rows, frozenset[str]]:
    schema, _, table = name.partition(".")
    if schema == "lake":
        members = [f"public.{each}" for (each,) in database.query(_MEMBERS, f"^{table}_[0-9]$")]
        columns, _, key = _source(database, members[0], is_masked=False)
        rows = Counter(
            {
                (each, *row): count
                for each in members
                for row, count in _source(database, each, is_masked=False)[1].items()
            }
        )
        return ["_source", *columns], rows, key | {"_source"}
    columns = [str(column) for (column,) in database.query(_COLUMNS, name)]
    texts = ", ".join(f"({_MASKED.get(each, each) if is_masked else each})::text" for each in columns)
    rows = Counter(tuple(row) for (row,) in database.query(f"SELECT ARRAY[{texts}] FROM {name}"))
    return columns, rows, frozenset(str(column) for (column,) in database.query(_KEY, name))


def noted(lake: Mirror, columns: Mapping[str, str]) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of these columns, as Spark reads them, ordered by text."""
    sink = lake.open_sink()  # needed by some DataFrames while they are read
    found = _read_by_spark(
        sink, {f"public.{name}": (each.split(", "), None) for name, each in columns.items()}
    )
    return {name: sorted(found[f"public.{name}"], key=str) for name in columns}


def _targets(sink: Sink, config: PipelineConfig, columns: Mapping[str, list[str]]) -> dict[str, Rows]:
    live = {name: (each, _LIVE.get(config.mode_of(TableName.parse(name)))) for name, each in columns.items()}
    return {name: Counter(tuple(map(_text, row)) for row in rows) for name, rows in _read(sink, live).items()}


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _read(
    sink: Sink, wanted: Mapping[str, tuple[list[str], _Live | None]]
) -> dict[str, list[tuple[Any, ...]]]:
    """The targets that have all these columns.

    Delta tables are read by our own reader, since Spark needs a second for each table.
    """
    if not isinstance(sink, DeltaSink):
        return _read_by_spark(sink, wanted)
    found: dict[str, list[tuple[Any, ...]]] = {}
    for name, (columns, live) in wanted.items():
        files = files_of(sink.path(TableName.parse(name)))
        if set(columns) <= set(files.schema.names):
            rows = read_all(files).to_pylist()
            found[name] = [
                tuple(row[each] for each in columns)
                for row in rows
                if live is None or row[live[0]] is live[1]
            ]
    return found


def _read_by_spark(
    sink: Sink, wanted: Mapping[str, tuple[list[str], _Live | None]]
) -> dict[str, list[tuple[Any, ...]]]:
    frames: dict[str, DataFrame] = {}
    for name, (columns, live) in wanted.items():
        frame = sink.read(TableName.parse(name))
        if set(columns) <= set(frame.columns):
            kept = frame if live is None else frame.where(F.col(live[0]) == live[1])
            row = F.to_json(F.struct(*columns), {"ignoreNullFields": "false"})
            frames[name] = kept.select(F.lit(name), row)
    found: dict[str, list[tuple[Any, ...]]] = {name: [] for name in frames}
    if frames:
        for name, row in reduce(DataFrame.unionAll, frames.values()).collect():
            found[name].append(tuple(json.loads(row, parse_float=str).values()))
    return found
