"""Keys of two polls, compared side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.capture.polling import known_keys
from penstock.capture.polling import known_keys as key_file
from penstock.capture.polling.known_keys import KeyTexts, KnownKeys
from penstock.position import Position
from penstock.schema import Column, TableName, TableSchema

TABLE = TableSchema(
    1, TableName("public", "t"), (Column("id", pa.int64(), 20), Column("code", pa.int64(), 20)), ("id",)
)
KEYS = st.sets(st.integers(-40, 40), max_size=60)


def in_order(keys: set[int], rows: int = 3) -> Iterator[KeyTexts]:
    """Some rows at a time; several keys share a hash."""
    ordered = sorted(keys, key=lambda key: (key % 7, key))
    for at in range(0, len(ordered), rows):
        part = ordered[at : at + rows]
        texts = [[str(key % 7) for key in part], [f"({key})" for key in part], [str(key) for key in part]]
        yield [pa.array(column, pa.string()) for column in texts]


def gone(known: KnownKeys, before: Position | None, keys: set[int]) -> list[int]:
    return sorted(
        int(key) for texts in known.compare(TABLE, before, in_order(keys)) for key in texts[2].to_pylist()
    )


@given(looks=st.lists(KEYS, min_size=1, max_size=5), rows=st.integers(1, 9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_keys_that_are_gone_are_those_that_were_there(
    looks: list[set[int]],
    rows: int,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_keys, "_BATCH_ROWS", rows)
    monkeypatch.setattr(key_file, "_BATCH_ROWS", rows)
    known = KnownKeys(tmp_path_factory.mktemp("keys"))
    before: Position | None = None
    held: set[int] = set()
    for number, keys in enumerate(looks, 1):
        assert gone(known, before, keys) == (sorted(held - keys) if before is not None else [])
        is_new = known.adopt(1, Position.of(number))
        assert is_new == (before is None or keys != held)
        before, held = Position.of(number) if is_new else before, keys


def test_unadopted_state_changes_nothing(tmp_path: Path) -> None:
    known = KnownKeys(tmp_path)
    known.store(TABLE, Position.of(5), in_order({1, 2}))
    assert gone(known, Position.of(5), {2}) == [1]
    assert gone(known, Position.of(5), {2}) == [1]
    known.adopt(1, Position.of(6))
    assert gone(known, Position.of(6), {2}) == []


def test_same_keys_are_not_written_again_unless_a_copy_is_compared_with_them(tmp_path: Path) -> None:
    known = KnownKeys(tmp_path)
    known.store(TABLE, Position.of(5), in_order({1, 2, 3}))
    assert gone(known, Position.of(5), {1, 2}) == [3]
    assert (tmp_path / "1.new").exists()
    assert gone(known, Position.of(5), {1, 2, 3}) == []
    assert not (tmp_path / "1.new").exists(), "nor are leftovers of an earlier poll"
    assert not known.adopt(1, Position.of(6))
    assert known.has(TABLE, Position.of(5))
    assert list(known.compare(TABLE, Position.of(5), in_order({1, 2, 3}), keeps_same=True)) == []
    assert known.adopt(1, Position.of(6))


def test_files_of_other_looks_go_and_those_of_other_tables_stay(tmp_path: Path) -> None:
    known = KnownKeys(tmp_path)
    for oid, at in ((1, 5), (1, 6), (2, 5)):
        known.store(replace(TABLE, oid=oid), Position.of(at), in_order({1}))
    known.keep_only({1: Position.of(6)})
    assert [known.has(replace(TABLE, oid=oid), Position.of(at)) for oid, at in ((1, 5), (1, 6), (2, 5))] == [
        False,
        True,
        True,
    ]


def test_keys_of_another_column_or_type_are_as_good_as_lost(tmp_path: Path) -> None:
    """A comparison would report all of them as deleted, and confuse rows with the same text in another
    column.
    """
    known = KnownKeys(tmp_path)
    known.store(TABLE, Position.of(5), in_order({1}))
    assert known.has(TABLE, Position.of(5))
    assert not known.has(TABLE.with_key(["code"]), Position.of(5))
    other = replace(TABLE, columns=(Column("id", pa.string(), 25), TABLE.columns[1]))
    assert not known.has(other, Position.of(5))
    (tmp_path / next(path.name for path in tmp_path.iterdir())).write_bytes(b"PAR1")
    assert not known.has(TABLE, Position.of(5)), "nor are those that cannot be read"


@given(keys=st.tuples(KEYS, KEYS, KEYS), rows=st.integers(1, 9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_keys_deleted_from_a_copy_are_reported_unless_the_poll_before_had_them(
    keys: tuple[set[int], set[int], set[int]],
    rows: int,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_keys, "_BATCH_ROWS", rows)
    monkeypatch.setattr(key_file, "_BATCH_ROWS", rows)
    before, copied, now = keys
    known = KnownKeys(tmp_path_factory.mktemp("keys"))
    known.store(TABLE, Position.of(5), in_order(before))
    known.store_copied(TABLE, Position.of(6), in_order(copied))
    assert known.copies(TABLE, Position.of(5), Position.of(7)) == [Position.of(6)]
    compared = known.compare(TABLE, Position.of(5), in_order(now), keeps_same=True)
    assert sorted(int(key) for texts in compared for key in texts[2].to_pylist()) == sorted(before - now)
    found = [
        int(key)
        for texts in known.compare_copy(TABLE, Position.of(6), Position.of(5))
        for key in texts[2].to_pylist()
    ]
    assert sorted(found) == sorted(copied - before - now)


def test_copies_are_forgotten_when_a_later_poll_is_durable(tmp_path: Path) -> None:
    known = KnownKeys(tmp_path)
    for at in (6, 8):
        known.store_copied(TABLE, Position.of(at), in_order({1}))
    assert known.copies(TABLE, Position.of(6), Position.of(9)) == [Position.of(8)]
    assert known.copies(TABLE, None, Position.of(8)) == [Position.of(6)], "the other is later than the poll"
    assert known.copies(TABLE.with_key(["code"]), None, Position.of(9)) == [], "keys of another kind"
    known.forget_copies({1: Position.of(7), 2: Position.of(9)})
    assert known.copies(TABLE, None, Position.of(9)) == [Position.of(8)]
