"""Rows that are rejected during a snapshot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.change import ChangeCounts
from penstock.config.policies import RefusedPolicy
from penstock.errors import RowRefusedError, SnapshotLostError, UnrepresentableError
from penstock.pipeline.dead_letters.queue import DeadLetterQueue, ResyncDeadLetters
from penstock.pipeline.dead_letters.store import DeadLetterStore, check_held, load_held
from penstock.pipeline.transform_sink import TransformingSink
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable, inspect_tables
from penstock.postgres.connection import connect
from penstock.postgres.snapshot_export import inspect_outline
from penstock.postgres.types.column import TypePolicy
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import TableChanges
from penstock.sinks.modes import Mode
from penstock.transforms.transform import Transform
from tests.support.fix_captured import Captured
from tests.support.plain_queries import Made, PlainQuery
from tests.support.snapshot.copying import PIPELINE, SOURCE, Copying
from tests.support.snapshot.local import FileSink, LocalExecutors, OriginSink

STRICT = TypePolicy(on_unrepresentable="error")


class _CrashError(BaseException):
    """Simulates SIGKILL."""


def box(lake: Path, policy: RefusedPolicy = RefusedPolicy.DEAD_LETTERS) -> DeadLetterQueue:
    """The queue as a run opens it."""
    made = DeadLetterQueue(
        DeadLetterStore(lake, PIPELINE),
        LocalExecutors(),
        policy_of=lambda _: policy,
        mode_of=lambda _: Mode.MIRROR,
        reject_inexact=True,
    )
    made.begin({})
    return made


def make(copying: Copying, table: str) -> TableName:
    copying.captured.execute(
        f"CREATE TABLE {table} (id int PRIMARY KEY, n numeric, v text)",
        f"INSERT INTO {table} SELECT g, CASE WHEN g % 5 = 0 THEN 'NaN' ELSE g::numeric END, "
        "repeat(md5(g::text), 20) "
        "FROM generate_series(1, 120) g",
    )
    copying.captured.start()
    return TableName("public", table)


def letters(made: DeadLetterQueue) -> list[dict[str, Any]]:
    return [each for each in made.store.load().to_pylist() if each["status"] == "open"]


def assert_split(copying: Copying, made: DeadLetterQueue, name: TableName) -> None:
    """Each row of the source at the fence is in the target or is a dead letter."""
    target = copying.sink.load_target(name)
    assert target is not None
    assert target.applied is not None
    held = copying.held[target.applied][name]
    bad = sorted(int(key or 0) for key, number in zip(held["id"], held["n"], strict=True) if number == "NaN")
    found = letters(made)
    assert bad
    assert sorted(json.loads(each["key"])["id"] for each in found) == bad
    assert {each["commit_version"] for each in found} == {target.applied.value}
    assert {each["change_type"] for each in found} == {"snapshot"}
    good = sorted(int(key or 0) for key, number in zip(held["id"], held["n"], strict=True) if number != "NaN")
    assert sorted(row["id"] for row in copying.rows(name)) == good


def test_C08_rejected_rows_of_a_copy_are_dead_letters_also_where_they_changed_during_it(
    copying: Copying, tmp_path: Path
) -> None:
    name = make(copying, "refused")
    made = box(tmp_path / "lake")
    copying.run("refused", chunks=4, policy=STRICT, dead_letters=made)
    assert letters(made) == []
    copying.captured.execute(
        "UPDATE refused SET n = 1 WHERE id IN (5, 60)",
        "DELETE FROM refused WHERE id IN (10, 11, 65)",
        "UPDATE refused SET n = 'NaN' WHERE id IN (1, 2, 118)",
        "UPDATE refused SET v = 'still bad' WHERE id IN (15, 20)",
    )
    _, failures = copying.run("refused", policy=STRICT, dead_letters=made)
    assert not failures
    assert_split(copying, made, name)
    assert {
        json.loads(each["row"])["v"] for each in letters(made) if each["key"] in ('{"id":15}', '{"id":20}')
    } == {"still bad"}


def test_C08_dead_letters_of_a_copy_count_once_whenever_it_dies(
    copying: Copying, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = make(copying, "died")
    real = FileSink.finish_snapshot

    def before(*_: Any) -> None:
        raise _CrashError

    def after(*given: Any) -> None:
        real(*given)
        raise _CrashError

    for crash in (before, after):
        made = box(tmp_path / "lake")
        made.supersede_all(name)
        with monkeypatch.context() as patch:
            patch.setattr(FileSink, "finish_snapshot", crash)
            with pytest.raises(_CrashError):
                copying.run("died", policy=STRICT, dead_letters=made)
        assert letters(box(tmp_path / "lake")) == []
    made = box(tmp_path / "lake")
    target = copying.sink.load_target(name)
    assert target is not None
    made.begin({name: target})
    assert_split(copying, made, name)


def test_by_default_a_refused_row_stops_the_copy(copying: Copying, tmp_path: Path) -> None:
    name = make(copying, "stopped")
    _, failures = copying.run(
        "stopped", policy=STRICT, dead_letters=box(tmp_path / "lake", RefusedPolicy.STOP)
    )
    assert isinstance(failures[name], UnrepresentableError)


def test_C08_dead_letters_of_a_shadow_count_from_its_swap(copying: Copying, tmp_path: Path) -> None:
    name = make(copying, "shadowed")
    made = box(tmp_path / "lake")
    copying.run("shadowed", policy=STRICT, dead_letters=ResyncDeadLetters(made))
    target = copying.sink.load_target(name)
    assert target is not None
    assert target.applied is not None
    assert letters(made) == []
    made.screen_resync(copying.sink, target, TableChanges(name, (), ChangeCounts()), target.applied)
    assert letters(made) == []
    made.applied(name)
    assert_split(copying, made, name)


PRICES = PlainQuery(
    {"key": "id", "price": Made("integer", ("price",), lambda row: int(row["price"])), "v": "v"}
)


@pytest.mark.parametrize(
    "transform",
    [Transform(cast={"price": "int"}, rename={"id": "key"}), PRICES.transform()],
    ids=["cast", "query"],
)
def test_C08_K12_rows_rejected_by_a_transform_are_dead_letters_also_where_they_changed_during_the_copy(
    captured: Captured, transform: Transform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = f"prices_{'query' if transform.sql else 'cast'}"
    captured.execute(
        f"CREATE TABLE {table} (id int PRIMARY KEY, price text, v text)",
        f"INSERT INTO {table} SELECT g, CASE WHEN g % 5 = 0 THEN 'free' ELSE g::text END, "
        "repeat(md5(g::text), 20) "
        "FROM generate_series(1, 120) g",
    )
    captured.start()
    sink, name, made = OriginSink(tmp_path / "lake"), TableName("public", table), box(tmp_path / "lake")
    seen = TransformingSink(sink, lambda _: transform, LocalExecutors(), tmp_path / "staged", PRICES)
    copying = Copying(captured, tmp_path / "lake", executors=LocalExecutors(), sink=seen, rows=sink.rows)
    copying.run(table, chunks=4, dead_letters=made)
    captured.execute(
        f"UPDATE {table} SET price = '1' WHERE id IN (5, 60)",
        f"DELETE FROM {table} WHERE id IN (10, 11, 65)",
        f"UPDATE {table} SET price = 'dear' WHERE id IN (1, 2, 118)",
        f"UPDATE {table} SET v = 'still bad' WHERE id IN (15, 20)",
    )
    watcher, failures = copying.run(table, dead_letters=made)
    assert not failures
    assert watcher.resumed[name][0] >= 4
    target = sink.load_target(name)
    assert target is not None
    assert target.applied is not None
    held = copying.held[target.applied][name]
    prices = {int(key or 0): price or "" for key, price in zip(held["id"], held["price"], strict=True)}
    bad = sorted(key for key, price in prices.items() if not price.isdigit())
    found = letters(made)
    assert sorted(json.loads(each["key"])["id"] for each in found) == bad
    assert {each["code"] for each in found} == {"PEN-1415"}
    assert {json.loads(each["row"])["v"] for each in found if each["key"] in ('{"id":15}', '{"id":20}')} == {
        "still bad"
    }
    assert {row["key"]: row["price"] for row in sink.rows(name)} == {
        key: int(price) for key, price in prices.items() if price.isdigit()
    }
    assert held_keys(tmp_path, shape(copying, table)) == [(key,) for key in bad]


def shape(copying: Copying, *tables: str, into: TableName | None = None) -> TableSchema:
    with connect(copying.address) as connection:
        found = [table for table in inspect_tables(connection) if table.name.name in tables]
        table = found[0] if into is None else CatalogTable(1 << 62, into, tuple(found), SOURCE)
        return inspect_outline(connection, table, STRICT, "p").outline.schema


def held_keys(
    directory: Path, schema: TableSchema, fence: Position | None = None
) -> list[tuple[object, ...]]:
    """The keys of dead letters, as passed to a comparison."""
    keys = load_held(DeadLetterStore(directory / "lake", PIPELINE), schema, fence)
    return sorted(zip(*(keys.column(name).to_pylist() for name in schema.key), strict=True))


def test_C08_K11_rejected_rows_of_shards_are_dead_letters_of_their_shard(
    copying: Copying, tmp_path: Path
) -> None:
    """Two tables with the same keys, of which different rows are rejected; one has its columns in another
    order.
    """
    tables, into = ("shard_a", "shard_b"), TableName("lake", "shards")
    for table, columns, bad in (
        ("shard_a", "id int PRIMARY KEY, n numeric, v text", 5),
        ("shard_b", "v text, n numeric, id int PRIMARY KEY", 7),
    ):
        copying.captured.execute(
            f"CREATE TABLE {table} ({columns})",
            f"INSERT INTO {table} (id, n, v) "
            f"SELECT g, CASE WHEN g % {bad} = 0 THEN 'NaN' ELSE g::numeric END, repeat(md5(g::text), 20) "
            "FROM generate_series(1, 60) g",
        )
    copying.captured.start()
    made = box(tmp_path / "lake")
    copying.run(*tables, into=into, chunks=4, policy=STRICT, dead_letters=made)
    copying.captured.execute(
        "UPDATE shard_b SET n = 1 WHERE id IN (7, 56)",
        "UPDATE shard_b SET n = 'NaN' WHERE id IN (5, 59)",
        "DELETE FROM shard_a WHERE id = 60",
    )
    _, failures = copying.run(*tables, into=into, policy=STRICT, dead_letters=made)
    assert not failures
    target = copying.sink.load_target(into)
    assert target is not None
    assert target.applied is not None
    rows = {
        (int(key or 0), f"public.{table}"): number
        for table in tables
        for key, number in zip(
            *(copying.held[target.applied][TableName("public", table)][name] for name in ("id", "n")),
            strict=True,
        )
    }
    wrong = sorted(key for key, number in rows.items() if number == "NaN")
    assert held_keys(tmp_path, shape(copying, *tables, into=into)) == wrong
    assert sorted((row["id"], row[SOURCE]) for row in copying.rows(into)) == sorted(rows.keys() - set(wrong))
    found = letters(made)
    assert {each["table"] for each in found} == {"lake.shards"}
    assert len({each["ordinal"] for each in found}) == len(wrong), "each is named"
    assert sorted(json.loads(each["key"])["id"] for each in found) == sorted(key for key, _ in wrong)


def test_C08_dead_letters_are_returned_as_of_a_position(copying: Copying, tmp_path: Path) -> None:
    name = make(copying, "placed")
    made = box(tmp_path / "lake")
    copying.run("placed", policy=STRICT, dead_letters=made)
    target = copying.sink.load_target(name)
    assert target is not None
    assert target.applied is not None
    schema, fence = shape(copying, "placed"), target.applied
    bad = [(key,) for key in range(5, 121, 5)]
    assert held_keys(tmp_path, schema, fence) == bad
    assert held_keys(tmp_path, schema, Position.of(fence.value - 1)) == [], "they were refused later"
    assert held_keys(tmp_path, replace(schema, oid=1)) == [], "they are of another table"
    known = load_held(made.store, schema)
    pq.write_table(known.slice(3, 2), tmp_path / "held.parquet")
    check_held(schema, [tmp_path / "held.parquet"], known)
    with pytest.raises(RowRefusedError, match=r"2 rows of public\.placed"):
        check_held(schema, [tmp_path / "held.parquet"], known.slice(5))
    made.supersede_all(name)
    assert held_keys(tmp_path, schema, fence) == []
    other = DeadLetterStore(tmp_path / "lake", PIPELINE)
    _settle_late(other, fence)
    with pytest.raises(SnapshotLostError, match="were superseded or replayed"):
        load_held(other, schema, fence)


def _settle_late(store: DeadLetterStore, fence: Position) -> None:
    """Simulate a later epoch that settled all of them."""
    (path,) = [path for path in store.directory.glob("*.parquet") if not path.name.startswith(".")]
    found = pq.read_table(path, partitioning=None)
    late = pa.array([fence.value + 1] * found.num_rows, pa.int64())
    pq.write_table(
        found.set_column(found.column_names.index("settled_version"), "settled_version", late), path
    )
