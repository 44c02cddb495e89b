"""Schema changes of Postgres targets: in the transaction that writes the rows, with the same values, or not
at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.change import ChangeCounts, ChangeType
from penstock.config.policies import SchemaPolicy, SchemaRule
from penstock.errors import (
    ConnectionLostError,
    SchemaChangedError,
    SinkError,
    SinkRefusedError,
    TargetForeignError,
)
from penstock.pipeline.schema_changes.tracker import CatalogSnapshot, SchemaTracker
from penstock.position import Position
from penstock.postgres.catalog import CatalogShape, MissingValue
from penstock.postgres.connection import SourceAddress
from penstock.postgres.types.registry import BUILTIN_TYPES
from penstock.schema import Attributes, Column, TableSchema
from penstock.sinks.base import TableChanges, Target
from penstock.sinks.evolution import ResyncRequired, plan_evolution
from penstock.sinks.modes import Mode
from penstock.sinks.postgres.sink import PostgresSink
from penstock.sinks.postgres.targets import Naming
from penstock.spool import SpoolReader, SpoolWriter
from tests.support.contract.postgres_harness import ForgetfulExecutors
from tests.support.fix_postgres import Database
from tests.support.property.evolving import NAME, Act, Change, Source
from tests.support.sinks.source import Change as LogChange
from tests.support.sinks.source import Transaction, Value, own_arrays, whole

KINDS = {"insert": ChangeType.INSERT, "update": ChangeType.UPDATE_POSTIMAGE, "delete": ChangeType.DELETE}
_NUMBERS = count(1)

acts = st.tuples(
    st.sampled_from(
        [
            "write",
            "write",
            "write",
            "delete",
            "add",
            "add",
            "drop",
            "rename",
            "swap",
            "widen",
            "retype",
            "rewrite",
        ]
    ),
    st.integers(0, 5),
    st.sampled_from(["a", "b", "c"]),
)


class Follow:
    """A table, beginning with its snapshot: the sink, the spool, and the pipeline's work between them."""

    def __init__(
        self,
        root: Path,
        database: Database,
        mode: Mode = Mode.MIRROR,
        policy: SchemaPolicy = SchemaPolicy.EVOLVE,
    ) -> None:
        self.database = database
        self.executors = ForgetfulExecutors()
        self.schema = f"copy{next(_NUMBERS)}_public"
        naming = Naming(prefix=self.schema.removesuffix("public"))
        self.sink = PostgresSink(
            self.executors, SourceAddress.parse(database.dsn), "shop", naming, mode_of=lambda _: mode
        )
        self.shape: CatalogShape | None = None
        self.follower = SchemaTracker(lambda _: SchemaRule(policy, can_resync=mode.can_resync), self._inspect)
        self.position = 100
        self._writer = SpoolWriter(root / "spool", Position.of(100))
        self._reader = SpoolReader(root / "spool")

    def _inspect(self, _: object) -> CatalogShape:
        assert self.shape is not None
        return self.shape

    def copy(self, shape: CatalogShape, rows: list[dict[str, Any]]) -> None:
        fence, schema = Position.of(self.position), shape.schema
        place = self.sink.begin_snapshot(schema, fence)
        own = own_arrays(schema, [_valued(row) for row in rows])
        batch = pa.RecordBatch.from_arrays(
            [*own, pa.nulls(len(rows), place.schema.types[-1])], schema=place.schema
        )
        file, _ = self.sink.chunk_writer(iter([batch]), place, 0, fence)
        self.sink.finish_snapshot(schema, [file], fence)

    def spool(
        self, schema: TableSchema, kind: str, row: dict[str, Any], unchanged: tuple[str, ...] = ()
    ) -> None:
        self.position += 10
        self._writer.append(
            whole(schema, [Transaction(self.position, (LogChange(KINDS[kind], 0, _valued(row), unchanged),))])
        )

    def target(self) -> Target:
        target = self.sink.load_target(NAME)
        assert target is not None
        return target

    def plan(self, shape: CatalogShape) -> tuple[Target, TableChanges, Position]:
        """Raises `ResyncRequired`."""
        self._writer.seal()
        self.shape, target, end = shape, self.target(), Position.of(self.position)
        assert target.applied is not None
        if self.follower.observe_catalog({NAME: target}, CatalogSnapshot({NAME: shape.schema})):
            raise ResyncRequired
        found = self._reader.read(target.applied, end).tables[NAME]
        return (
            target,
            self.follower.follow(self.sink, target, TableChanges(NAME, found.slices, found.counts)),
            end,
        )

    def apply(self, shape: CatalogShape) -> None:
        self.sink.apply(*self.plan(shape))

    def rows(self, *names: str) -> list[tuple[str | None, ...]]:
        columns = ", ".join(f'"{name}"::text' for name in names)
        return self.database.query(f"SELECT {columns} FROM {self.schema}.t ORDER BY 1")

    def types(self) -> dict[str, str]:
        return dict(
            self.database.query(
                "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
                f"WHERE attrelid = '{self.schema}.t'::regclass AND attnum > 0 AND NOT attisdropped"
            )
        )

    def close(self) -> None:
        self.sink.close()
        self.database.execute(f"DROP SCHEMA IF EXISTS {self.schema} CASCADE")


def _valued(row: dict[str, Any]) -> dict[str, Value]:
    return {name: Value(None if value is None else str(value)) for name, value in row.items()}


def shape_of(
    *columns: tuple[int, str, str], width: int | None = None, heap: str = "0", **missing: str
) -> CatalogShape:
    """Columns as number, name and type; the first is the key."""
    declared = tuple(Column(name, pa.string(), *_declared(kind)) for _, name, kind in columns)
    numbers = tuple(number for number, _, _ in columns)
    schema = TableSchema(
        77, NAME, declared, (declared[0].name,), Attributes(numbers, width or max(numbers), heap)
    )
    return CatalogShape(
        schema, {name: MissingValue(text) for name, text in missing.items()}, 1 << 31, frozenset()
    )


def _declared(kind: str) -> tuple[int, int]:
    name, _, length = kind.partition("(")
    return BUILTIN_TYPES[name][0], int(length[:-1]) + 4 if length else -1


def _as_text(shape: CatalogShape) -> CatalogShape:
    return replace(shape, schema=_schema_as_text(shape.schema), next_xid=1 << 31)


def _schema_as_text(schema: TableSchema) -> TableSchema:
    return replace(
        schema, columns=tuple(replace(column, arrow_type=pa.string()) for column in schema.columns)
    )


@pytest.fixture
def follow(shared_database: Database, tmp_path: Path) -> Iterator[Follow]:
    with closing(Follow(tmp_path, shared_database)) as made:
        yield made


BEFORE = shape_of((1, "id", "int4"), (2, "a", "text"), (3, "b", "int4"))
ROWS = [{"id": 1, "a": "one", "b": 10}, {"id": 2, "a": "two", "b": None}]


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(acts, max_size=4), min_size=1, max_size=4))
@example(
    [
        [("add", 1, "b"), ("write", 1, "")],
        [("swap", 1, ""), ("widen", 1, "")],
        [("drop", 0, ""), ("write", 2, ""), ("add", 0, "a")],
    ]
)
def test_S01_to_S06_a_table_follows_in_the_transaction_that_needs_it(
    shared_database: Database, plan: list[list[Act]]
) -> None:
    source = Source()
    with TemporaryDirectory() as directory, closing(Follow(Path(directory), shared_database)) as made:
        made.copy(_as_text(source.shape()), list(source.table().values()))
        for number, some in enumerate(plan):
            changes = [
                change
                for act in (*some, ("write", 50 + number, ""))
                if (change := source.do(act)) is not None
            ]
            _follow(made, source, changes)
            names = [column.name for column in source.columns]
            expected = sorted(
                tuple(None if row[name] is None else str(row[name]) for name in names)
                for row in source.table().values()
            )
            assert sorted(made.rows(*names)) == expected
            declared = {"int4": "integer", "int8": "bigint", "text": "text"}
            assert {name: made.types()[name] for name in names} == {
                each.name: declared[each.kind] for each in source.columns
            }


def _follow(made: Follow, source: Source, changes: list[Change]) -> None:
    for change in changes:
        made.spool(_schema_as_text(change.schema), change.kind, change.row)
    try:
        made.apply(_as_text(source.shape()))
    except ResyncRequired:
        made.sink.release_ownership(NAME)
        made.copy(_as_text(source.shape()), list(source.table().values()))


def test_S01_existing_rows_have_the_default_of_the_source_in_a_new_column(follow: Follow) -> None:
    follow.copy(BEFORE, ROWS)
    after = shape_of(
        (1, "id", "int4"),
        (2, "a", "text"),
        (3, "b", "int4"),
        (4, "c", "numeric"),
        (5, "d", "text"),
        c="1.50",
        d="it's",
    )
    follow.spool(BEFORE.schema, "insert", {"id": 3, "a": "before", "b": 3})
    follow.spool(after.schema, "insert", {"id": 4, "a": "after", "b": 4, "c": None, "d": "own"})
    follow.spool(
        after.schema, "update", {"id": 1, "a": "one", "b": 11, "c": "1.50"}, ("d",)
    )  # its value is unchanged TOAST
    follow.apply(after)
    assert follow.rows("id", "a", "b", "c", "d") == [
        ("1", "one", "11", "1.50", "it's"),
        ("2", "two", None, "1.50", "it's"),
        ("3", "before", "3", "1.50", "it's"),
        ("4", "after", "4", None, "own"),
    ]
    assert follow.database.query(
        f"SELECT count(*) FROM pg_attrdef WHERE adrelid = '{follow.schema}.t'::regclass"
    ) == [(0,)]


def test_S02_S03_names_are_swapped_and_reused_and_dropped_columns_stay(follow: Follow) -> None:
    follow.copy(BEFORE, ROWS)
    follow.database.execute(f"CREATE VIEW {follow.schema}.seen AS SELECT a, b FROM {follow.schema}.t")
    swapped = shape_of((1, "key", "int4"), (2, "b", "text"), (3, "a", "int4"))
    follow.spool(swapped.schema, "update", {"key": 1, "b": "uno", "a": 11})
    follow.apply(swapped)
    assert follow.rows("key", "b", "a") == [("1", "uno", "11"), ("2", "two", None)]
    fewer = shape_of((1, "key", "int4"), (3, "a", "int4"), width=3)
    follow.spool(fewer.schema, "insert", {"key": 3, "a": 3})
    again = shape_of((1, "key", "int4"), (3, "a", "int4"), (4, "b", "date"))
    follow.spool(again.schema, "insert", {"key": 4, "a": 4, "b": "2026-01-01"})
    follow.apply(again)
    assert follow.rows("key", "a", "b", "b__dropped_1") == [
        ("1", "11", None, "uno"),
        ("2", None, None, "two"),
        ("3", "3", None, None),
        ("4", "4", "2026-01-01", None),
    ]
    assert follow.database.query(f"SELECT a, b FROM {follow.schema}.seen ORDER BY b") == [
        (None, 3),
        (None, 4),
        ("uno", 11),
        ("two", None),
    ]


def test_S04_a_type_that_holds_more_holds_more_in_the_target(follow: Follow) -> None:
    before = shape_of((1, "id", "int2"), (2, "a", "varchar(3)"), (3, "b", "float4"))
    follow.copy(before, [{"id": 1, "a": "one", "b": "1.1"}])
    longer = shape_of((1, "id", "int2"), (2, "a", "varchar(5)"), (3, "b", "float4"))
    text = shape_of((1, "id", "int2"), (2, "a", "text"), (3, "b", "float4"))
    follow.spool(before.schema, "insert", {"id": 2, "a": "two", "b": "0.1"})
    follow.spool(longer.schema, "insert", {"id": 3, "a": "three", "b": "0.1"})
    follow.apply(longer)
    assert follow.types()["a"] == "character varying(5)"
    follow.spool(text.schema, "insert", {"id": 4, "a": "as long as may be", "b": "0.1"})
    follow.apply(text)
    wider = shape_of((1, "id", "int8"), (2, "a", "text"), (3, "b", "float8"), heap="1")
    follow.spool(wider.schema, "insert", {"id": 5_000_000_000, "a": "", "b": "0.1"})
    follow.apply(wider)
    assert follow.types() == {"id": "bigint", "a": "text", "b": "double precision"}
    [(once, narrow)] = follow.database.query("SELECT 1.1::float4::float8::text, 0.1::float4::float8::text")
    assert [value for (value,) in follow.rows("b")] == sorted([once, narrow, narrow, narrow, "0.1"])


def test_S04_a_number_with_another_text_in_its_new_type_is_resynced(follow: Follow) -> None:
    """A row that arrives as `real` in the same epoch would become another double if its text were copied."""
    before = shape_of((1, "id", "int4"), (2, "f", "float4"))
    after = shape_of((1, "id", "int4"), (2, "f", "float8"), heap="1")
    follow.copy(before, [{"id": 1, "f": "1.1"}])
    follow.spool(before.schema, "insert", {"id": 2, "f": "0.1"})
    follow.spool(after.schema, "insert", {"id": 3, "f": "0.1"})
    with pytest.raises(ResyncRequired, match="cannot be altered in place"):
        follow.apply(after)
    assert follow.types() == {"id": "integer", "f": "real"}


def test_S05_a_column_that_changed_its_type_and_was_dropped_leaves_nothing_that_its_column_cannot_hold(
    follow: Follow,
) -> None:
    follow.copy(BEFORE, ROWS)
    retyped = shape_of((1, "id", "int4"), (2, "a", "text"), (3, "b", "text"), heap="1")
    gone = shape_of((1, "id", "int4"), (2, "a", "text"), width=3, heap="1")
    follow.spool(BEFORE.schema, "insert", {"id": 3, "a": "three", "b": 30})
    follow.spool(retyped.schema, "insert", {"id": 4, "a": "four", "b": "not a number"})
    follow.spool(gone.schema, "insert", {"id": 5, "a": "five"})
    follow.apply(gone)
    assert follow.rows("id", "b")[:3] == [("1", "10"), ("2", None), ("3", "30")]
    assert follow.rows("id", "b")[3:] == [("4", None), ("5", None)]


@pytest.mark.parametrize("mode", [Mode.SOFT_DELETE, Mode.HISTORY, Mode.APPEND])
def test_S01_in_every_mode_a_column_is_added_beside_those_of_the_mode(
    shared_database: Database, tmp_path: Path, mode: Mode
) -> None:
    after = shape_of((1, "id", "int4"), (2, "a", "text"), (3, "renamed", "int4"), (4, "c", "int4"), c="5")
    with closing(Follow(tmp_path, shared_database, mode)) as follow:
        follow.copy(BEFORE, ROWS)
        follow.spool(BEFORE.schema, "insert", {"id": 3, "a": "three", "b": 3})
        follow.spool(after.schema, "update", {"id": 1, "a": "uno", "renamed": 10, "c": 6})
        follow.apply(after)
        found = sorted(follow.rows("id", "a", "c"), key=repr)
    past = None if mode is Mode.APPEND else "5"  # an append log keeps the old values
    versions = [("1", "uno", "6")] if mode is Mode.SOFT_DELETE else [("1", "one", past), ("1", "uno", "6")]
    assert found == [*versions, ("2", "two", past), ("3", "three", past)]


def test_S01_R05_a_table_without_key_follows_and_its_rows_are_counted_with_the_new_column(
    follow: Follow,
) -> None:
    before = _keyless(shape_of((1, "a", "int4")))
    after = _keyless(shape_of((1, "a", "int4"), (2, "c", "int4"), c="5"))
    follow.copy(before, [{"a": 1}, {"a": 1}, {"a": 1}, {"a": 2}])
    follow.spool(before.schema, "delete", {"a": 1})
    follow.spool(before.schema, "insert", {"a": 3})
    follow.spool(after.schema, "delete", {"a": 1, "c": 5})
    follow.spool(after.schema, "insert", {"a": 1, "c": 6})
    follow.apply(after)
    assert sorted(follow.rows("a", "c")) == [("1", "5"), ("1", "6"), ("2", "5"), ("3", "5")]


def _keyless(shape: CatalogShape) -> CatalogShape:
    return replace(shape, schema=replace(shape.schema, key=()))


def test_S01_a_table_is_altered_though_no_row_of_it_changed(follow: Follow) -> None:
    follow.copy(BEFORE, ROWS)
    after = shape_of((1, "id", "int4"), (2, "a", "text"), (3, "renamed", "int4"), (4, "c", "int4"), c="5")
    target, end = follow.target(), Position.of(150)
    assert target.origin is not None
    evolution = plan_evolution(target.schema, target.key, target.origin, [after.schema], after)
    changes = TableChanges(NAME, (), ChangeCounts(), {}, evolution)
    follow.sink.apply(target, changes, end)
    assert (follow.target().applied, follow.rows("renamed", "c")) == (end, [("10", "5"), (None, "5")])
    with pytest.raises(SchemaChangedError):  # with the outdated state
        follow.sink.apply(target, changes, Position.of(160))


def test_S13_under_ignore_the_table_keeps_its_columns_and_still_holds_longer_values(
    shared_database: Database, tmp_path: Path
) -> None:
    with closing(Follow(tmp_path, shared_database, policy=SchemaPolicy.IGNORE)) as follow:
        follow.copy(shape_of((1, "id", "int4"), (2, "a", "varchar(3)"), (3, "b", "int4")), ROWS)
        after = shape_of(
            (1, "id", "int4"), (2, "renamed", "varchar(9)"), (3, "b", "int4"), (4, "c", "int4"), c="5"
        )
        follow.spool(after.schema, "insert", {"id": 3, "renamed": "as long", "b": None, "c": 3})
        follow.apply(after)
        assert follow.types() == {"id": "integer", "a": "character varying(9)", "b": "integer"}
        assert follow.rows("id", "a", "b") == [("1", "one", "10"), ("2", "two", None), ("3", "as long", None)]


def test_K01_an_epoch_that_alters_the_table_is_done_once_and_leaves_nothing_when_it_dies(
    follow: Follow,
) -> None:
    follow.copy(BEFORE, ROWS)
    after = shape_of((1, "id", "int4"), (2, "b", "text"), (3, "a", "int4"), (4, "c", "int4"), c="5")
    follow.spool(after.schema, "insert", {"id": 3, "b": "three", "a": 3, "c": "not a number"})
    with pytest.raises(SinkRefusedError):
        follow.apply(after)
    assert set(follow.types()) == {"id", "a", "b"}
    assert follow.target().schema.names == ["id", "a", "b"]
    follow.database.execute(f"DROP SCHEMA {follow.schema} CASCADE")
    follow.position += 10
    follow.copy(BEFORE, ROWS)
    follow.spool(after.schema, "insert", {"id": 3, "b": "three", "a": 3, "c": 3})
    planned = follow.plan(after)
    follow.executors.is_silent = True
    with pytest.raises(ConnectionLostError):
        follow.sink.apply(*planned)
    follow.executors.is_silent = False
    follow.sink.apply(*planned)
    assert follow.rows("id", "b", "a", "c") == [
        ("1", "one", "10", "5"),
        ("2", "two", None, "5"),
        ("3", "three", "3", "3"),
    ]


def test_K09_a_table_altered_by_another_writer_is_not_written_to(follow: Follow) -> None:
    follow.copy(BEFORE, ROWS)
    follow.spool(BEFORE.schema, "insert", {"id": 3, "a": "three", "b": 3})
    late = follow.plan(BEFORE)
    after = shape_of((1, "id", "int4"), (2, "a", "text"), (3, "renamed", "int4"))
    follow.sink.release_ownership(NAME)
    follow.position -= 5
    follow.copy(after, [])
    with pytest.raises(SchemaChangedError):
        follow.sink.apply(*late)


def test_a_view_that_keeps_a_column_s_type_is_named(follow: Follow) -> None:
    follow.copy(BEFORE, ROWS)
    follow.database.execute(f"CREATE VIEW {follow.schema}.seen AS SELECT b FROM {follow.schema}.t")
    after = shape_of((1, "id", "int4"), (2, "a", "text"), (3, "b", "int8"), heap="1")
    follow.spool(after.schema, "insert", {"id": 3, "a": "three", "b": 3})
    with pytest.raises(SinkRefusedError, match=rf"view {follow.schema}\.seen") as refused:
        follow.apply(after)
    assert "drop the objects that the message names" in str(refused.value.hint)
    follow.database.execute(f"DROP VIEW {follow.schema}.seen")
    follow.apply(after)
    assert follow.types()["b"] == "bigint"


def test_K08_a_table_of_a_version_without_lineage_continues_and_is_resynced_at_a_schema_change(
    follow: Follow,
) -> None:
    follow.copy(BEFORE, ROWS)
    follow.database.execute("ALTER TABLE penstock.applied DROP origin, DROP relation")
    follow.spool(BEFORE.schema, "insert", {"id": 3, "a": "three", "b": 3})
    follow.apply(BEFORE)
    after = shape_of((1, "id", "int4"), (2, "a", "text"), (3, "b", "int4"), (4, "c", "int4"))
    follow.spool(after.schema, "insert", {"id": 4, "a": "four", "b": 4, "c": 4})
    with pytest.raises(ResyncRequired, match="no record of column numbers"):
        follow.apply(after)
    follow.sink.release_ownership(NAME)
    follow.copy(after, [{"id": 1, "a": "one", "b": 1, "c": 1}])
    assert (follow.rows("id", "c"), follow.target().origin is None) == ([("1", "1")], False)


def test_K10_a_table_that_replaced_the_target_is_not_touched(follow: Follow) -> None:
    """It has the same name, but the pipeline did not create it."""
    follow.copy(BEFORE, ROWS)
    target = follow.target()
    follow.database.execute(
        f"ALTER TABLE {follow.schema}.t RENAME TO old; "
        f"CREATE TABLE {follow.schema}.t (LIKE {follow.schema}.old)"
    )
    follow.spool(BEFORE.schema, "insert", {"id": 3, "a": "three", "b": 3})
    for attempt in (
        lambda: follow.apply(BEFORE),
        follow.target,
        lambda: follow.copy(BEFORE, ROWS),
        lambda: follow.sink.drop(NAME),
    ):
        with pytest.raises(TargetForeignError):
            attempt()
    assert follow.rows("id") == []
    follow.executors.is_late = True
    follow.database.execute(f"DROP TABLE {follow.schema}.t; ALTER TABLE {follow.schema}.old RENAME TO t")
    assert follow.target() == target
    with pytest.raises(SinkError):
        follow.apply(BEFORE)
    follow.database.execute(
        f"ALTER TABLE {follow.schema}.t RENAME TO old; "
        f"CREATE TABLE {follow.schema}.t (LIKE {follow.schema}.old)"
    )
    with pytest.raises(SinkError):  # an older attempt that finishes late
        follow.executors.kept[0]()
    assert follow.rows("id") == []
    follow.executors.is_late = False
    follow.database.execute(f"DROP TABLE {follow.schema}.t; ALTER TABLE {follow.schema}.old RENAME TO t")
    follow.apply(BEFORE)
    assert len(follow.rows("id")) == 3


def test_K10_a_table_created_while_ours_is_being_copied_is_not_touched(follow: Follow) -> None:
    place = follow.sink.begin_snapshot(BEFORE.schema, Position.of(100))
    assert follow.target().applied is None
    follow.database.execute(
        f"CREATE SCHEMA {follow.schema}; CREATE TABLE {follow.schema}.t AS SELECT 1 AS id"
    )
    with pytest.raises(TargetForeignError):
        follow.sink.finish_snapshot(BEFORE.schema, [], Position.of(100))
    assert (follow.rows("id"), place.prefix != "") == ([("1",)], True)
