"""The lookup cache: which keys are read again, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typing_extensions import override

from penstock.contracts.reference import KeyedReferenceTable
from penstock.errors import ConfigError, ReferenceTableError, ReferenceUnreadableError, SchemaChangedError
from penstock.reference.history import KeyValue, key_values, row_schema
from penstock.reference.join import Asked, LookupCache, LookupFinder
from penstock.reference.keyed_tables import ParquetKeyedTable, key_texts

COLUMNS = pa.schema([pa.field("id", pa.int32()), pa.field("name", pa.string())])
SCHEMA = row_schema(COLUMNS)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def cache_of(clock: Clock, max_entries: int = 100) -> LookupCache:
    return LookupCache(SCHEMA, ttl_seconds=10, negative_ttl_seconds=2, max_entries=max_entries, clock=clock)


def rows_of(*ids: int) -> pa.Table:
    return pa.Table.from_pylist([{"id": key, "name": f"n{key}"} for key in ids], SCHEMA)


def put(cache: LookupCache, asked: Sequence[int], found: Sequence[int]) -> None:
    cache.put([(key,) for key in asked], [(key,) for key in found], rows_of(*found))


def names(cache: LookupCache, *ids: int) -> list[str | None]:
    rows, is_match = cache.take([(key,) for key in ids])
    found: list[str | None] = rows.column("name").to_pylist()
    assert is_match.to_pylist() == [name is not None for name in found]
    return found


def test_found_and_missing_rows_are_cached_for_their_time(clock: Clock) -> None:
    cache = cache_of(clock)
    assert cache.missing([(1,), (2,), None, (1,)]) == [(1,), (2,)]
    put(cache, [1, 2], [2])
    assert cache.missing([(1,), (2,)]) == []
    assert names(cache, 2, 1, 2, 3) == ["n2", None, "n2", None]
    clock.now = 2
    assert cache.missing([(1,), (2,)]) == [(1,)], "a missing row is read again sooner"
    clock.now = 10
    assert cache.missing([(1,), (2,)]) == [(1,), (2,)]


def test_entry_that_ran_out_still_serves_the_batch_it_was_looked_up_for(clock: Clock) -> None:
    cache = cache_of(clock)
    put(cache, [1], [1])
    clock.now = 1000
    assert names(cache, 1) == ["n1"]


def test_least_recently_used_entry_is_evicted_first(clock: Clock) -> None:
    cache = cache_of(clock, max_entries=2)
    put(cache, [1, 2], [1, 2])
    names(cache, 1)
    put(cache, [3], [3])
    assert names(cache, 3) == ["n3"]
    assert cache.missing([(1,), (2,), (3,)]) == [(2,)]
    assert len(cache) == 2


def test_batch_larger_than_the_cache_is_served_whole(clock: Clock) -> None:
    cache = cache_of(clock, max_entries=2)
    put(cache, range(10), range(10))
    assert names(cache, *range(10)) == [f"n{key}" for key in range(10)]
    assert len(cache) == 2


def test_few_entries_do_not_keep_the_whole_answer_in_memory(clock: Clock) -> None:
    cache = cache_of(clock, max_entries=3)
    for start in range(0, 100, 10):
        put(cache, range(start, start + 10), range(start, start + 10))
        names(cache, 0, start)
        assert cache._held_rows <= 6 + 10


@dataclass(frozen=True)
class Counted(KeyedReferenceTable):
    rows: dict[int, str]
    asked: list[list[int]] = field(default_factory=list)

    @override
    def schema(self) -> pa.Schema:
        return COLUMNS

    @override
    def key(self) -> tuple[str, ...]:
        return ("id",)

    @override
    def lookup(self, keys: pa.RecordBatch) -> pa.Table:
        wanted = keys.column("id").to_pylist()
        self.asked.append(wanted)
        return pa.Table.from_pylist(
            [{"id": key, "name": self.rows[key]} for key in wanted if key in self.rows], SCHEMA
        )


def ask(column: pa.Array) -> Asked:
    keys: list[KeyValue | None] = key_values([column], ["id"])
    return Asked(keys, [column])


def test_each_key_is_looked_up_once_and_only_if_it_can_exist() -> None:
    table = Counted({1: "one", 3: "three"})
    finder = LookupFinder(table, 60, 60, 100, "test-once")
    found = finder.find(ask(pa.array([1, 2, None, 1, 2**40, 3], pa.int64())))
    assert found.rows.column("name").to_pylist() == ["one", None, None, "one", None, "three"]
    assert found.is_match.to_pylist() == [True, False, False, True, False, True]
    again = finder.find(ask(pa.array([3, 2**40, 2], pa.int64())))
    assert again.rows.column("name").to_pylist() == ["three", None, None]
    assert table.asked == [[1, 2, 3]]


def test_parquet_files_are_read_by_key(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": pa.array([1, 2, 3], pa.int32()), "name": ["a", "b", None]}), path)
    finder = LookupFinder(ParquetKeyedTable.inspect(path, ["id"]), 60, 60, 100, "test-parquet")
    found = finder.find(ask(pa.array([3, 1, 9], pa.int64())))
    assert found.rows.column("name").to_pylist() == [None, "a", None]
    assert found.is_match.to_pylist() == [True, True, False]


def test_files_with_other_columns_are_not_taken_for_the_same_table(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": [1], "name": ["a"]}), path)
    table = ParquetKeyedTable.inspect(path, ["id"])
    pq.write_table(pa.table({"name": ["b"], "id": [1]}), path)
    keys = pa.RecordBatch.from_pydict({"id": [1]})
    assert table.lookup(keys).column("name").to_pylist() == ["b"], "in another order they are the same"
    pq.write_table(pa.table({"id": [1], "name": [1]}), path)
    with pytest.raises(SchemaChangedError):
        table.lookup(keys)
    path.unlink()
    with pytest.raises(ReferenceUnreadableError):
        table.lookup(keys)
    pq.write_table(pa.table({"id": [1]}), path)
    with pytest.raises(ConfigError, match="nothing"):
        ParquetKeyedTable.inspect(path, ["nothing"])


def test_two_rows_of_one_requested_key_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": pa.array([1, 2, 2], pa.int32()), "name": ["a", "b", "c"]}), path)
    finder = LookupFinder(ParquetKeyedTable.inspect(path, ["id"]), 60, 60, 100, "test-twice")
    assert finder.find(ask(pa.array([1]))).rows.column("name").to_pylist() == ["a"]
    with pytest.raises(ReferenceTableError, match="same id"):
        finder.find(ask(pa.array([1, 2])))


def test_key_beyond_its_type_is_not_taken_for_a_missing_one() -> None:
    columns = [pa.array([1, None], pa.int64())]
    exact = pa.array([None, [("id", "infinity")]], pa.map_(pa.string(), pa.string()))
    finder = LookupFinder(Counted({1: "one"}), 60, 60, 100, "test-exact")
    with pytest.raises(ReferenceTableError, match="cannot hold"):
        finder.find(Asked(key_values(columns, ["id"], exact), columns))


def test_keys_are_written_as_the_server_reads_them() -> None:
    assert key_texts(pa.array([b"\x00\xff"])).to_pylist() == [r"\x00ff"]
    assert key_texts(pa.array([0.1, 1e300])).to_pylist() == ["0.1", "1e+300"]
    assert key_texts(pa.array([True])).to_pylist() == ["true"]
    assert key_texts(pa.array([-5])).to_pylist() == ["-5"]
