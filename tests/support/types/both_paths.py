"""The same rows by snapshot and by stream, each read as the product reads it.

The database's settings are as unhelpful as possible, so values render correctly only with the connections'
pinned settings. One stream runs for all tests of a module, started before their types and tables exist.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pyarrow as pa

from penstock.change import ChangeBatch, Transactions
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable, inspect_schema, inspect_tables, inspect_types, load_types
from penstock.postgres.chunks import plan_chunks, read_chunk
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from penstock.postgres.replication import ReplicationStream, StreamRequest
from penstock.postgres.slot import current_position
from penstock.postgres.snapshot_export import export_snapshot
from penstock.postgres.types.registry import TypeResolver
from penstock.schema import TableSchema
from tests.support.fix_postgres import Database

PUBLICATION = "everything"
_DEADLINE_SECONDS = 20.0
_UNHELPFUL = {
    "bytea_output": "escape",
    "datestyle": "German",
    "intervalstyle": "postgres_verbose",
    "timezone": "Asia/Kolkata",
    "extra_float_digits": "-15",
    "xmlbinary": "hex",
    "search_path": "public",
}


@dataclass(frozen=True)
class Exactly:
    """Expected of a value that its type cannot hold: null, and this text in `_exact`."""

    text: str


@dataclass(frozen=True)
class Road:
    """The result of one path: the schema, and the rows by id, or in order if they have none."""

    schema: TableSchema
    rows: list[dict[str, Any]]


class BothPaths:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.address = SourceAddress.parse(database.dsn)
        for name, value in _UNHELPFUL.items():
            database.execute(f"ALTER DATABASE {database.name} SET {name} = '{value}'")
        database.execute(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES")
        slot = f"{database.name}_types"
        database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
        with connect(self.address) as connection:
            types = TypeResolver(None, inspect_types(connection), partial(load_types, self.address))
        self._decoder = PgOutputDecoder(types=types)
        self._stream = ReplicationStream(self.address, StreamRequest(slot, PUBLICATION, Position.ZERO))

    @contextmanager
    def open(self) -> Iterator[BothPaths]:
        self._stream.open()
        try:
            self._stream.start()
            yield self
        finally:
            self._stream.close()

    def setting(self, name: str) -> str:
        """The text that a connection without pinned settings gets."""
        with self.database.connect() as connection:
            row = connection.execute(f"SHOW {name}".encode()).fetchone()
        assert row is not None
        return str(row[0])

    def catalog(self, name: str) -> tuple[CatalogTable, TableSchema]:
        with connect(self.address) as connection:
            table = next(table for table in inspect_tables(connection) if table.name.name == name)
            return table, inspect_schema(connection, table, publication=PUBLICATION)

    def snapshots(self, names: Sequence[str]) -> dict[str, Road]:
        """All of these tables under one exported snapshot."""
        found = {}
        with export_snapshot(self.address) as exported, connect(self.address) as connection:
            tables = {table.name.name: table for table in inspect_tables(connection)}
            for name in names:
                schema = inspect_schema(connection, tables[name], publication=PUBLICATION)
                chunks = plan_chunks(connection, tables[name], schema, 1 << 30, PUBLICATION)
                batches = [
                    batch for chunk in chunks for batch in read_chunk(self.address, exported.name, chunk)
                ]
                found[name] = Road(schema, [row for batch in batches for row in _plain(batch)])
        return found

    def snapshot(self, name: str) -> Road:
        return self.snapshots([name])[name]

    def changes(self) -> list[ChangeBatch]:
        """Everything that has committed since the last call."""
        with connect(self.address) as connection:
            goal = current_position(connection)
        # The goal may not be the end of a commit, so something must commit after it.
        self.database.execute("SELECT pg_logical_emit_message(true, 'roads', '')")
        found: list[ChangeBatch] = []
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while time.monotonic() < deadline:
            for step in self._decoder.decode(self._stream.take(0.05)):
                if isinstance(step, Transactions):
                    found += step.batches
                    if step.end > goal:
                        return found
                elif getattr(step, "position", Position.ZERO) > goal:
                    return found
        raise AssertionError(f"the stream did not get to {goal}")

    def live(self) -> dict[str, Road]:
        """The changes of every table since the last call."""
        found: dict[str, Road] = {}
        for batch in self.changes():
            found.setdefault(batch.table.name.name, Road(batch.table, [])).rows.extend(_plain(batch.rows))
        return found

    def both(self, table: str, rows: Sequence[str]) -> list[dict[str, Any]]:
        """Insert `rows` (SQL, without ids) before the snapshot and again after it; gives them if both paths
        agree on every value.
        """
        self.database.execute(
            "; ".join(f"INSERT INTO {table} VALUES ({at}, {row})" for at, row in enumerate(rows))
        )
        by_snapshot = self.snapshot(table)
        self.changes()
        self.database.execute(
            "; ".join(f"INSERT INTO {table} VALUES ({at + 1000}, {row})" for at, row in enumerate(rows))
        )
        by_stream = self.live()[table]
        assert by_stream.schema == by_snapshot.schema
        first, second = (sorted(road.rows, key=lambda row: row["id"]) for road in (by_snapshot, by_stream))
        assert [row["id"] + 1000 for row in first] == [row["id"] for row in second]
        assert len(first) == len(rows)
        for here, there in zip(first, second, strict=True):
            for name in by_snapshot.schema.column_names[1:]:
                assert repr(here[name]) == repr(there[name]), name
            assert here["_exact"] == there["_exact"]
        return first

    def check(self, columns: Mapping[str, Sequence[tuple[str, Any]]], *, arrays: bool = True) -> TableSchema:
        """Each type with its values, as (SQL, expected); also NULL, and arrays of the type. Both paths must
        return the expected values.
        """
        name = f"t{self.database.query('SELECT count(*) FROM pg_class')[0][0]}"
        types = list(columns)
        self.database.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, {', '.join(_declared(types, arrays))})"
        )
        height = max(len(values) for values in columns.values()) + 1
        filled = {each: [*columns[each], *[("NULL", None)] * (height - len(columns[each]))] for each in types}
        sql = [
            ", ".join(_row([(each, filled[each][at][0]) for each in types], arrays)) for at in range(height)
        ]
        found = self.both(name, sql)
        rendered = self._rendered(name, types, arrays)
        for at, row in enumerate(found):
            wanted = _expected([filled[each][at] for each in types], rendered[at], arrays)
            exact = {column: value.text for column, value in wanted.items() if isinstance(value, Exactly)}
            assert row["_exact"] == (exact or None), row["_exact"]
            for column, value in wanted.items():
                assert repr(row[column]) == repr(None if isinstance(value, Exactly) else value), (
                    types,
                    column,
                )
        return self.catalog(name)[1]

    def check_key(self, columns: Mapping[str, Sequence[tuple[str, Any]]]) -> None:
        """Each type as a primary key: in the snapshot, and in inserts, updates and deletes of the stream."""
        first = self.database.query("SELECT count(*) FROM pg_class")[0][0]
        tables = {f"k{first}_{at}": type_name for at, type_name in enumerate(columns)}
        for name, type_name in tables.items():
            literals = ", ".join(f"({literal}, 0)" for literal, _ in columns[type_name])
            self.database.execute(
                f"CREATE TABLE {name} (x {type_name} PRIMARY KEY, v int); "
                f"INSERT INTO {name} VALUES {literals}"
            )
        self.check_keys(
            {name: [_value(value) for _, value in columns[type_name]] for name, type_name in tables.items()}
        )

    def check_keys(self, tables: Mapping[str, Sequence[tuple[Any, dict[str, str] | None]]]) -> None:
        """Tables with key x and a column v, and the values of x, with their text in `_exact`; all rows are
        updated and deleted.
        """
        self.database.execute("; ".join(f"UPDATE {name} SET v = 1" for name in tables))
        by_snapshot = self.snapshots(list(tables))
        self.database.execute("; ".join(f"DELETE FROM {name}" for name in tables))
        by_stream = self.live()
        for name, values in tables.items():
            schema, expected = by_stream[name].schema, sorted(map(repr, values))
            assert schema.key == ("x",)
            assert sorted(repr((row["x"], row["_exact"])) for row in by_snapshot[name].rows) == expected, (
                schema.columns[0]
            )
            for kind in ("insert", "update_postimage", "delete"):
                rows = [row for row in by_stream[name].rows if row["_change_type"] == kind]
                assert sorted(repr((row["x"], row["_exact"])) for row in rows) == expected, (
                    schema.columns[0],
                    kind,
                )

    def _rendered(self, name: str, types: Sequence[str], arrays: bool) -> list[tuple[str | None, ...]]:
        """The texts of the first rows, as Postgres writes them under the pinned settings."""
        columns = [f"c{at}" for at in range(len(types))] + (
            [f"a{at}" for at in range(len(types))] if arrays else []
        )
        texts = ", ".join(
            f"CASE WHEN {column} IS DISTINCT FROM NULL THEN format('%%s', {column}) END" for column in columns
        )
        with connect(self.address) as connection:
            statement: Any = f"SELECT {texts} FROM public.{name} WHERE id < %s ORDER BY id"
            rows: list[Any] = connection.execute(statement, [1000]).fetchall()
        return rows


def _declared(types: Sequence[str], arrays: bool) -> list[str]:
    plain = [f"c{at} {each}" for at, each in enumerate(types)]
    return plain + [f"a{at} {each}[]" for at, each in enumerate(types)] if arrays else plain


def _row(values: Sequence[tuple[str, str]], arrays: bool) -> list[str]:
    plain = [literal for _, literal in values]
    return plain + [f"ARRAY[{literal}, NULL]::{each}[]" for each, literal in values] if arrays else plain


def _expected(
    values: Sequence[tuple[str, Any]], rendered: Sequence[str | None], arrays: bool
) -> dict[str, Any]:
    found = {f"c{at}": value for at, (_, value) in enumerate(values)}
    for at, (_, value) in enumerate(values if arrays else ()):
        text = rendered[len(values) + at]
        found[f"a{at}"] = Exactly(text or "") if isinstance(value, Exactly) else [value, None]
    for at, (_, value) in enumerate(values):
        if isinstance(value, Exactly):
            assert rendered[at] == value.text
    return found


def _value(value: Any) -> tuple[Any, dict[str, str] | None]:
    return (None, {"x": value.text}) if isinstance(value, Exactly) else (value, None)


def _plain(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Rows as Python values, with maps as dictionaries."""
    types = {field.name: field.type for field in batch.schema}
    for row in batch.to_pylist():
        yield {name: _python(value, types[name]) for name, value in row.items()}


def _python(value: Any, arrow_type: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_map(arrow_type):
        return dict(value)
    if pa.types.is_list(arrow_type):
        return [_python(each, arrow_type.value_type) for each in value]
    return value.astimezone(UTC) if isinstance(value, datetime) and value.tzinfo is not None else value
