"""Routing of tables into one: which tables, into which target, and the changes the log has for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
import yaml

from penstock.config.model import PipelineConfig, load_config
from penstock.config.policies import Route, SchemaPolicy, SchemaRule
from penstock.errors import (
    ConfigError,
    ConnectionLostError,
    MembersDifferError,
    PenstockError,
    TargetRewoundError,
    UnsupportedTableError,
)
from penstock.pipeline.epoch_log import Epoch
from penstock.pipeline.routing import gather, route_tables, routed_views
from penstock.pipeline.schema_changes.catalog_changes import include_dropped
from penstock.pipeline.schema_changes.tracker import CatalogSnapshot, SchemaTracker, find_resync_reason
from penstock.pipeline.sources.resume_checks import fail_rejoined
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.pipeline.tables import Tables, fail_unpublished
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.connection import Connection
from penstock.postgres.membership import Membership
from penstock.schema import Attributes, Column, TableName, TableSchema, is_routed, joined_schema
from penstock.sinks.base import Target, Targets
from penstock.sinks.evolution import ResyncRequired
from penstock.sinks.modes import Mode
from penstock.spool.reader import SpoolRange, SpoolReader
from tests.support.spool.builders import Commit, at, capture

INTO = TableName("lake", "orders")
ID, NOTE = Column("id", pa.int32(), 23), Column("note", pa.string(), 25)


def shard(number: int, *columns: Column, key: tuple[str, ...] = ("id",)) -> TableSchema:
    columns = columns or (ID, NOTE)
    numbers = Attributes(tuple(range(1, len(columns) + 1)), len(columns), "heap")
    return TableSchema(number, TableName(f"shard_{number}", "orders"), columns, key, numbers)


def configured(tmp_path: Path, tables: list[Any], **more: Any) -> PipelineConfig:
    document = {
        "pipeline": "p",
        "source": {"dsn": "postgresql://u@h/d"},
        "tables": tables,
        "sink": {"delta": {"path": "lake"}},
        **more,
    }
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(document))
    return load_config(tmp_path / "p.yaml")


# --- what they make together --------------------------------------------------------------------------------


def test_K11_the_source_column_is_the_last_column_and_part_of_the_key() -> None:
    joined = joined_schema(INTO, "_source", [shard(2), shard(1)])
    assert joined.name == INTO
    assert joined.column_names == ("id", "note", "_source")
    assert joined.key == ("id", "_source")
    assert joined.members is not None
    assert [member.oid for member in joined.members.schemas] == [1, 2]
    assert is_routed(joined.oid)
    assert not is_routed(2**32)
    assert joined.oid < 2**63, "it is kept as a bigint"


def test_tables_without_a_key_make_one_without_a_key() -> None:
    assert joined_schema(INTO, "_source", [shard(1, key=()), shard(2, key=())]).key == ()


def test_columns_may_be_in_another_order() -> None:
    other = shard(2, NOTE, ID)
    joined = joined_schema(INTO, "_source", [shard(1), other])
    assert joined.members is not None
    aligned = joined.members.schemas[1]
    assert aligned.column_names == ("id", "note")
    assert aligned.attributes is not None
    assert aligned.attributes.numbers == (2, 1)


def test_user_defined_types_may_have_another_oid_in_every_schema() -> None:
    moods = [
        shard(number, ID, Column("mood", pa.string(), 20_000 + number, reader="enum")) for number in (1, 2)
    ]
    assert joined_schema(INTO, "_source", moods).column_names == ("id", "mood", "_source")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (shard(2, ID), "shard_1.orders has a column 'note', and shard_2.orders has not"),
        (
            shard(2, ID, NOTE, Column("more", pa.string(), 25)),
            "shard_2.orders has a column 'more', and shard_1.orders has not",
        ),
        (
            shard(2, Column("id", pa.int64(), 20), NOTE),
            "column 'id' has another type in shard_2.orders than in shard_1.orders",
        ),
        (shard(2, Column("id", pa.int32(), 23, 4), NOTE), "column 'id' has another type"),
        (
            shard(2, key=("id", "note")),
            r"the key of shard_1.orders is \(id\), and the key of shard_2.orders is \(id, note\)",
        ),
        (shard(2, key=()), "and the key of shard_2.orders is none"),
    ],
)
def test_tables_that_differ_are_refused_and_the_differences_named(other: TableSchema, words: str) -> None:
    with pytest.raises(MembersDifferError, match=words):
        joined_schema(INTO, "_source", [shard(1), other])


def test_a_column_of_the_name_of_the_source_column_is_refused() -> None:
    with pytest.raises(MembersDifferError, match="'_Source'") as raised:
        joined_schema(INTO, "_source", [shard(1, ID, Column("_Source", pa.string(), 25))])
    assert raised.value.hint == f"set source_column of {INTO} to another name"


@pytest.mark.parametrize(
    "others",
    [
        [shard(1), shard(2), shard(3)],
        [shard(1)],
        [shard(1), replace(shard(2), oid=20)],
        [shard(1), replace(shard(2), name=TableName("shard_2", "renamed"))],
        [shard(1, ID), shard(2, ID)],
        [shard(1, key=("note",)), shard(2, key=("note",))],
        [shard(1), replace(shard(2), attributes=Attributes((1, 3), 3, "heap"))],
    ],
    ids=[
        "one more",
        "one less",
        "recreated",
        "renamed",
        "a column less",
        "another key",
        "a recreated column",
    ],
)
def test_another_set_of_tables_has_another_number(others: list[TableSchema]) -> None:
    numbers = {
        joined_schema(INTO, "_source", [shard(1), shard(2)]).oid,
        joined_schema(INTO, "_source", [shard(2), shard(1)]).oid,
    }
    assert len(numbers) == 1
    assert joined_schema(INTO, "_source", others).oid not in numbers
    assert joined_schema(INTO, "_from", [shard(1), shard(2)]).oid not in numbers


def test_rows_that_were_rewritten_or_emptied_do_not_make_it_another() -> None:
    emptied = replace(shard(2), attributes=Attributes((1, 2), 2, "another heap"))
    assert (
        joined_schema(INTO, "_source", [shard(1), emptied]).oid
        == joined_schema(INTO, "_source", [shard(1), shard(2)]).oid
    )


# --- the configuration --------------------------------------------------------------------------------------


def test_rules_route_tables(tmp_path: Path) -> None:
    rules = [
        "public.*",
        {"match": "shard_*.orders", "into": "lake.orders", "mode": "history", "schema_changes": "stop"},
    ]
    config = configured(tmp_path, rules, mode="append")
    member, plain = TableName("shard_1", "orders"), TableName("public", "items")
    assert config.route_of(member) == Route(INTO, "_source")
    assert config.route_of(plain) is None
    assert [config.selects(name) for name in (member, plain, INTO)] == [True, True, False]
    assert [config.has(name) for name in (member, plain, INTO)] == [False, True, True]
    assert [config.mode_of(name) for name in (plain, INTO)] == [Mode.APPEND, Mode.HISTORY]
    assert config.schema_rule(INTO) == SchemaRule(SchemaPolicy.STOP, can_resync=False)


def test_the_last_of_several_rules_names_the_target(tmp_path: Path) -> None:
    rules = [
        {"match": "s*.orders", "into": "lake.all"},
        {"match": "s9.orders", "into": "lake.odd", "source_column": "from"},
        "s9.*",
    ]
    config = configured(tmp_path, rules)
    assert config.route_of(TableName("s1", "orders")) == Route(TableName("lake", "all"), "_source")
    assert config.route_of(TableName("s9", "orders")) == Route(TableName("lake", "odd"), "from")
    assert config.route_of(TableName("s9", "items")) is None


def test_overrides_of_a_routed_table_or_of_its_members_hold(tmp_path: Path) -> None:
    config = configured(tmp_path, [{"match": "shard_*.orders", "into": "lake.orders"}])
    one, two = TableName("shard_1", "orders"), TableName("shard_2", "orders")
    without = config.with_tables((), [one])
    assert (without.selects(one), without.selects(two), without.has(INTO)) == (False, True, True)
    gone = config.with_tables((), [INTO])
    assert (gone.selects(one), gone.has(INTO)) == (False, False)
    assert config.with_tables([INTO], ()).tables == config.tables, "it is no table of the source"


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([{"match": "a.*", "source_column": "s"}], "source_column: needs into:"),
        ([{"match": "a.*", "into": "orders"}], "not a table name"),
        (
            [{"match": "a.*", "into": "l.o"}, {"match": "b.*", "into": "l.o", "source_column": "s"}],
            "have different values of source_column",
        ),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(tmp_path: Path, rules: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configured(tmp_path, rules)


# --- which tables there are ---------------------------------------------------------------------------------


def routed(
    *schemas: TableSchema, refused: dict[TableName, PenstockError] | None = None
) -> tuple[dict[TableName, CatalogTable], dict[TableName, TableSchema], dict[TableName, PenstockError]]:
    tables = {schema.name: CatalogTable(schema.oid, schema.name) for schema in schemas}
    shapes, reasons = {schema.name: schema for schema in schemas}, dict(refused or {})
    route_tables(
        tables,
        shapes,
        reasons,
        lambda name: Route(INTO, "_source") if "shard" in name.schema else None,
        lambda _: None,
    )
    return tables, shapes, reasons


def test_a_routed_table_replaces_its_members() -> None:
    plain = replace(shard(9), name=TableName("public", "items"))
    tables, schemas, refused = routed(shard(2), plain, shard(1))
    assert tables.keys() == schemas.keys() == {INTO, plain.name}
    assert [source.oid for source in tables[INTO].sources] == [1, 2]
    assert tables[INTO].oid == schemas[INTO].oid
    assert refused == {}


def test_a_member_that_cannot_be_mirrored_takes_the_others_along() -> None:
    reason = UnsupportedTableError("it became unlogged", hint="ALTER TABLE …")
    tables, _, refused = routed(shard(1), shard(2), refused={shard(2).name: reason})
    assert tables == {}
    assert str(refused[INTO]).startswith(
        "PEN-1420: shard_2.orders, which is routed into lake.orders, cannot be mirrored: it became unlogged"
    )
    assert refused.keys() == {INTO}


def test_a_table_with_the_name_of_the_target_is_refused() -> None:
    _, _, refused = routed(shard(1), replace(shard(9), name=INTO))
    assert "is itself a table of the pipeline" in refused[INTO].message


def _filled() -> Tables:
    members = (CatalogTable(1, shard(1).name), CatalogTable(2, shard(2).name))
    statuses = {INTO: TableStatus(TableState.CATCHING_UP, Position.of(5), Position.of(5))}
    return Tables({INTO: CatalogTable(1 << 62, INTO, members, "_source")}, statuses=statuses)


def test_the_publication_must_hold_the_members() -> None:
    assert _filled().capturable == [shard(1).name, shard(2).name]


def test_a_member_that_left_the_publication_fails_the_routed_table() -> None:
    tables = _filled()
    fail_unpublished(tables, [shard(2).name], str)
    assert tables.statuses[INTO].state is TableState.FAILED
    again = _filled()
    recorded = {shard(2).name: Membership(None, "7/1")}
    kept = fail_rejoined(
        again, recorded, {shard(1).name: Membership(1, "7/2"), shard(2).name: Membership(2, "7/3")}, str
    )
    assert (again.statuses[INTO].reason or "").startswith(TargetRewoundError.code)
    assert kept == recorded, "so that it fails again"


# --- what the log has ---------------------------------------------------------------------------------------


def _target(schema: TableSchema) -> Target:
    return Target(INTO, schema.oid, schema.key, pa.schema([]), at(0))


def _spooled(tmp_path: Path, *schemas: TableSchema) -> SpoolRange:
    commits = [[Commit(10 * (at + 1), (schema,))] for at, schema in enumerate(schemas)]
    capture(tmp_path, 0, commits)
    return SpoolReader(tmp_path).read(at(0), at(10 * len(schemas)))


def test_the_changes_of_all_members_come_together_in_the_order_of_the_log(tmp_path: Path) -> None:
    joined = joined_schema(INTO, "_source", [shard(1), shard(2)])
    found = _spooled(
        tmp_path, shard(2), shard(1), replace(shard(7), name=TableName("public", "items")), shard(2)
    )
    changes = gather(_target(joined), found, {joined.oid: joined})
    assert changes is not None
    assert changes.table == INTO
    assert changes.counts.rows == 3
    assert sorted({slice.file.oid for slice in changes.slices}) == [1, 2]
    views = routed_views(_target(joined), changes, {joined.oid: joined})
    filled = {version.oid: (view.source, view.fills["_source"].as_py()) for version, view in views.items()}
    assert filled == {1: ("_source", "shard_1.orders"), 2: ("_source", "shard_2.orders")}


def test_without_changes_of_a_member_there_is_nothing(tmp_path: Path) -> None:
    joined = joined_schema(INTO, "_source", [shard(1), shard(2)])
    assert gather(_target(joined), _spooled(tmp_path, shard(3)), {joined.oid: joined}) is None


@pytest.mark.parametrize(
    "logged",
    [
        replace(shard(2), name=TableName("shard_2", "renamed")),
        replace(shard(2), oid=20),
        shard(2, ID, NOTE, Column("more", pa.string(), 25)),
        shard(2, Column("id", pa.int64(), 20), NOTE),
        shard(2, key=()),
    ],
    ids=["renamed", "recreated", "a column more", "another type", "another key"],
)
def test_a_changed_member_has_the_table_resynced(tmp_path: Path, logged: TableSchema) -> None:
    joined = joined_schema(INTO, "_source", [shard(1), shard(2)])
    changes = gather(_target(joined), _spooled(tmp_path, shard(1), logged), {joined.oid: joined})
    assert changes is not None
    with pytest.raises(ResyncRequired, match="altered, renamed or recreated"):
        routed_views(_target(joined), changes, {joined.oid: joined})


def test_unknown_members_are_looked_up_before_anything_is_applied(tmp_path: Path) -> None:
    joined = joined_schema(INTO, "_source", [shard(1), shard(2)])
    changes = gather(_target(joined), _spooled(tmp_path, shard(1)), {})
    assert changes is not None
    with pytest.raises(ConnectionLostError):
        routed_views(_target(joined), changes, {})


def test_an_added_member_has_the_table_resynced() -> None:
    before, now = (
        joined_schema(INTO, "_source", [shard(number) for number in numbers])
        for numbers in ((1, 2), (1, 2, 3))
    )
    follower = SchemaTracker(lambda _: SchemaRule(), lambda _: (_ for _ in ()).throw(AssertionError()))
    assert follower.observe_catalog({INTO: _target(before)}, CatalogSnapshot({INTO: before})) == {}
    assert follower.observe_catalog({INTO: _target(before)}, CatalogSnapshot({INTO: now})) == {
        INTO: "the tables routed into it changed"
    }
    assert follower.routed.keys() == {before.oid, now.oid}, "the target stays"
    assert find_resync_reason(now, _target(now)) is None


def test_a_routed_table_whose_members_differ_is_not_taken_for_gone(tmp_path: Path) -> None:
    config = configured(tmp_path, [{"match": "shard_*.orders", "into": "lake.orders"}])
    failed = TableStatus.failed(MembersDifferError("the tables are not alike"), None)
    tables = Tables(statuses={INTO: failed})
    last = Epoch(1, at(5), None, "system", {INTO: TableStatus(TableState.STREAMING, at(5), at(5))})
    include_dropped(cast(Connection, None), tables, cast(Targets, None), last, config)
    assert tables.statuses == {INTO: failed}
    assert tables.gone == {}
