"""A table with DDL and row changes and the log that the server would send, and a target that follows. Simple
and slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import pyarrow as pa

from penstock.postgres.catalog import CatalogShape, MissingValue
from penstock.schema import Attributes, Column, TableName, TableSchema
from penstock.sinks.evolution import Evolution, plan_evolution, same_views
from penstock.sinks.lineage import Origin
from penstock.sinks.row_values import View

NAME = TableName("public", "t")
TYPES = {"int4": (23, pa.int32()), "int8": (20, pa.int64()), "text": (25, pa.string())}

Row = dict[str, Any]
Act = tuple[str, int, str]


@dataclass(frozen=True)
class SourceColumn:
    number: int
    name: str
    kind: str
    missing: Any = None

    def column(self) -> Column:
        oid, arrow_type = TYPES[self.kind]
        return Column(self.name, arrow_type, oid)


@dataclass(frozen=True)
class Change:
    schema: TableSchema
    kind: str
    row: Row


@dataclass
class Source:
    """`heap` identifies the file: a rewrite of all rows creates another one and clears the missing values."""

    columns: list[SourceColumn] = field(
        default_factory=lambda: [SourceColumn(1, "id", "int4"), SourceColumn(2, "a", "int4")]
    )
    width: int = 2
    heap: int = 0
    rows: dict[int, dict[int, Any]] = field(default_factory=lambda: {1: {1: 1, 2: 10}, 2: {1: 2, 2: 20}})

    def schema(self) -> TableSchema:
        columns = tuple(each.column() for each in self.columns)
        attributes = Attributes(tuple(each.number for each in self.columns), self.width, str(self.heap))
        return TableSchema(77, NAME, columns, (columns[0].name,), attributes)

    def shape(self) -> CatalogShape:
        missing = {
            each.name: MissingValue(str(each.missing)) for each in self.columns if each.missing is not None
        }
        return CatalogShape(self.schema(), missing, 0, frozenset())

    def table(self) -> dict[int, Row]:
        return {key: {each.name: row[each.number] for each in self.columns} for key, row in self.rows.items()}

    def copy(self) -> Source:
        return Source(
            list(self.columns), self.width, self.heap, {key: dict(row) for key, row in self.rows.items()}
        )

    def do(self, act: Act) -> Change | None:
        kind, which, name = act
        return getattr(self, f"_{kind}")(which, name)  # type: ignore[no-any-return]

    def _write(self, key: int, name: str) -> Change:
        """Insert or update."""
        del name
        values: dict[int, Any] = {
            each.number: key if each.number == 1 else self._value(each, key * 7) for each in self.columns
        }
        kind = "update" if key in self.rows else "insert"
        self.rows[key] = values
        return Change(self.schema(), kind, self.table()[key])

    def _delete(self, key: int, name: str) -> Change | None:
        del name
        if self.rows.pop(key, None) is None:
            return None
        return Change(self.schema(), "delete", {self.columns[0].name: key})

    def _add(self, which: int, name: str) -> None:
        """Without a default, with a default, and with one that differs by row."""
        if name in self._names() or len(self.columns) > 5:
            return
        self.width += 1
        default = 5 if which % 3 == 1 else None
        self.columns.append(SourceColumn(self.width, name, "int4", default))
        for key, row in self.rows.items():
            row[self.width] = key * 1000 if which % 3 == 2 else default
        if which % 3 == 2:
            self._rewrite(0, "")

    def _drop(self, which: int, name: str) -> None:
        del name
        if len(self.columns) > 1:
            gone = self.columns.pop(1 + which % (len(self.columns) - 1))
            for row in self.rows.values():
                del row[gone.number]

    def _rename(self, which: int, name: str) -> None:
        at = which % len(self.columns)
        if name not in self._names():
            self.columns[at] = replace(self.columns[at], name=name)

    def _swap(self, which: int, name: str) -> None:
        del name
        one, other = which % len(self.columns), (which + 1) % len(self.columns)
        names = self.columns[other].name, self.columns[one].name
        self.columns[one] = replace(self.columns[one], name=names[0])
        if one != other:
            self.columns[other] = replace(self.columns[other], name=names[1])

    def _widen(self, which: int, name: str) -> None:
        del name
        at = which % len(self.columns)
        if self.columns[at].kind == "int4":
            self.columns[at] = replace(self.columns[at], kind="int8")
            self._rewrite(0, "")

    def _retype(self, which: int, name: str) -> None:
        """Change the type with a USING clause that changes the values."""
        del name
        at = which % len(self.columns)
        if at and self.columns[at].kind != "text":
            self.columns[at] = replace(self.columns[at], kind="text")
            for row in self.rows.values():
                row[self.columns[at].number] = f"was {row[self.columns[at].number]}"
            self._rewrite(0, "")

    def _rewrite(self, which: int, name: str) -> None:
        del which, name
        self.heap += 1
        self.columns = [replace(each, missing=None) for each in self.columns]

    def _names(self) -> set[str]:
        return {each.name for each in self.columns}

    @staticmethod
    def _value(column: SourceColumn, number: int) -> Any:
        return f"new {number}" if column.kind == "text" else number + column.number


@dataclass
class FollowingTarget:
    """A mirror. `copies` counts how often it had to be copied."""

    columns: pa.Schema
    key: tuple[str, ...]
    origin: Origin
    rows: dict[int, Row]

    @classmethod
    def copy(cls, source: Source) -> FollowingTarget:
        schema = source.schema()
        origin = Origin.of(schema)
        assert origin is not None
        columns = pa.schema([pa.field(each.name, each.arrow_type) for each in schema.columns])
        return cls(columns, schema.key, Origin.parse(str(origin)), source.table())

    def follow(
        self, versions: list[TableSchema], now: CatalogShape
    ) -> tuple[Mapping[TableSchema, View], Evolution | None]:
        """Follow the changes as the pipeline does, with a catalog state from after all changes."""
        views = same_views(self.columns, self.key, self.origin, versions)
        if views is not None and self.origin.has_all_of(now.schema):
            return views, None
        evolution = plan_evolution(self.columns, self.key, self.origin, versions, now)
        return evolution.views, evolution

    def apply(self, changes: list[Change], now: CatalogShape) -> None:
        views, evolution = self.follow(
            [version for version, _ in groupby(change.schema for change in changes)], now
        )
        if evolution is not None:
            self._evolve(evolution)
        for change in changes:
            view = views[change.schema]
            row: Row = dict.fromkeys(self.columns.names) | {
                name: fill.as_py() for name, fill in view.fills.items()
            }
            row |= {view.names[name]: value for name, value in change.row.items() if name in view.names}
            key = row[self.key[0]]
            self.rows.pop(key, None)
            if change.kind != "delete":
                self.rows[key] = row

    def _evolve(self, evolution: Evolution) -> None:
        fills = {added.name: added.fill.as_py() for added in evolution.added}
        for key, row in self.rows.items():
            self.rows[key] = {evolution.renamed.get(name, name): value for name, value in row.items()} | fills
        self.columns, self.key, self.origin = evolution.columns, evolution.key, evolution.origin
