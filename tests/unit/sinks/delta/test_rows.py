"""Rows of a Delta table found by key: which files are read, which rows match, and the state after a
commit.
"""

from __future__ import annotations

import errno
import json
import os
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.change import EXACT, EXACT_TYPE
from penstock.errors import SinkError, TargetFileLostError
from penstock.position import Position
from penstock.sinks.delta.commit import commit, commit_info, marked, transaction, wide_stats
from penstock.sinks.delta.deletion_vectors import DeletionVector, write_vectors
from penstock.sinks.delta.lookup import (
    FoundRows,
    Probes,
    ScanFile,
    TableFiles,
    find_counted,
    find_rows,
    load_bounds,
    read_rows,
)
from penstock.sinks.delta.state import DataFile, Unsupported
from penstock.sinks.modes import Layout, Mode
from tests.support.delta_tables import APPLICATION, create_table, state_of

ZONED, LOCAL = pa.timestamp("us", "UTC"), pa.timestamp("us")


def stats(low: object, high: object) -> str:
    return json.dumps(
        {"numRecords": 3, "minValues": {"k": low}, "maxValues": {"k": high}, "nullCount": {"k": 0}}
    )


def may_hold(kind: pa.DataType, value: object, text: str | None) -> bool:
    probes = Probes(pa.table({"k": pa.array([value], kind)}), ["k"])
    return probes.may_be_within(load_bounds(text, (pa.field("k", kind),)))


@pytest.mark.parametrize(
    ("kind", "low", "high", "inside", "outside"),
    [
        (pa.int64(), 3, 9, [3, 5, 9], [2, 10]),
        (pa.string(), "b", "d", ["b", "cc", "d"], ["a", "da", "é"]),
        (pa.string(), "b", "d" * 32, ["d" * 32 + "x", "zz"], ["a"]),
        (
            pa.date32(),
            "2024-01-01",
            "2024-02-01",
            [date(2024, 1, 1), date(2024, 2, 1)],
            [date(2023, 12, 31), date(2024, 2, 2)],
        ),
        (
            ZONED,
            "2024-01-01T00:00:00.123Z",
            "2024-01-01T02:00:00.123+01:00",
            [datetime(2024, 1, 1, 0, 0, 0, 123000, UTC), datetime(2024, 1, 1, 1, 0, 0, 123999, UTC)],
            [datetime(2024, 1, 1, 1, 1, 0, 125000, UTC)],
        ),
        # Amsterdam was 19 minutes and 32 seconds ahead, and Spark writes no seconds of a zone.
        (
            ZONED,
            "1800-01-01T00:19:32.000+00:19",
            None,
            [datetime(1800, 1, 1, tzinfo=UTC)],
            [datetime(1799, 12, 31, 23, 58, tzinfo=UTC)],
        ),
        (
            LOCAL,
            "2024-01-01T00:00:00.123",
            "2024-01-01T00:00:00.123",
            [datetime(2024, 1, 1, 0, 0, 0, 123456)],  # noqa: DTZ001
            [datetime(2024, 1, 2)],  # noqa: DTZ001
        ),
        (pa.float64(), 1.0, 2.0, [5.0, float("nan")], []),
        (pa.decimal128(10, 2), 1.0, 2.0, [Decimal(5)], []),
        (pa.bool_(), False, False, [True], []),
        (pa.binary(), "YQ==", "YQ==", [b"z"], []),
        (pa.int64(), 3, 9, [None], []),
        (pa.int64(), 3.5, "9", [1, 100], []),
        (pa.int64(), True, True, [1, 100], []),
        (pa.date32(), "+12024-01-01", "+12024-01-01", [date(2024, 1, 1)], []),
        (ZONED, "2024-01-01T00:00:00", "2024-01-01T00:00:00", [datetime(2030, 1, 1, tzinfo=UTC)], []),
        (pa.int64(), None, 9, [1, 9], [10]),
    ],
)
def test_a_file_is_passed_over_only_where_its_bounds_rule_the_key_out(
    kind: pa.DataType, low: object, high: object, inside: list[object], outside: list[object]
) -> None:
    assert all(may_hold(kind, value, stats(low, high)) for value in inside)
    assert not any(may_hold(kind, value, stats(low, high)) for value in outside)


@pytest.mark.parametrize(
    "text", [None, "", "{}", "{", '{"minValues": 3}', '{"minValues": null, "maxValues": null}']
)
def test_statistics_that_say_nothing_rule_nothing_out(text: str | None) -> None:
    assert may_hold(pa.int64(), 5, text)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1), st.integers(0, 30), st.integers(0, 30), st.booleans())
def test_bounds_never_exclude_an_existing_key(keys: list[int], low: int, high: int, many: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if many:
            patch.setattr("penstock.sinks.delta.lookup._MANY", 0)
        probes = Probes(pa.table({"k": pa.array(keys)}), ["k"])
        found = probes.may_be_within(load_bounds(stats(low, high), (pa.field("k", pa.int64()),)))
    there = any(low <= key <= high for key in keys)
    assert found or not there
    assert there or many or not found


def table_of(
    root: Path, *files: pa.Table, vector: DeletionVector | None = None, rows_a_group: int = 3
) -> TableFiles:
    for number, rows in enumerate(files):
        pq.write_table(rows, root / f"f{number}", row_group_size=rows_a_group)
    scanned = tuple(
        ScanFile(f"f{number}", ((None, None),) * 2, vector if number == 0 else None)
        for number in range(len(files))
    )
    return TableFiles(str(root), files[0].schema, files[0].schema, ("a", "b"), scanned)


def keyed(*rows: tuple[int | None, str | None, dict[str, str] | None]) -> pa.Table:
    a, b, exact = zip(*rows, strict=True)
    texts = [None if each is None else list(each.items()) for each in exact]
    return pa.table({"a": pa.array(a, pa.int64()), "b": pa.array(b), EXACT: pa.array(texts, EXACT_TYPE)})


def places(found: list[FoundRows]) -> dict[str, list[int]]:
    return {each.path: each.positions.tolist() for each in found}


def test_a_row_is_met_by_its_whole_key_in_any_row_group(tmp_path: Path) -> None:
    first = keyed(*((number % 4, f"{number % 3}", None) for number in range(12)))
    second = keyed((1, "x", None), (2, "1", None))
    table = table_of(tmp_path, first, second)
    keys = keyed((1, "1", None), (2, "1", None), (9, "1", None))
    found = find_rows(table, keys, ("a", "b"))
    assert places(found) == {"f0": [1, 10], "f1": [1]}
    assert [each.file_rows for each in found] == [12, 2]
    assert read_rows(table, found, ()).known.to_pylist() == [*keys.to_pylist()[:2], keys.to_pylist()[1]]
    assert find_rows(table, keys.slice(0, 0), ("a", "b")) == []


def test_a_key_that_its_column_cannot_hold_is_met_by_its_text(tmp_path: Path) -> None:
    table = table_of(
        tmp_path,
        keyed(
            (None, "x", {"a": "1e40"}), (None, "x", {"a": "NaN"}), (None, "x", None), (1, "x", {"c": "1e40"})
        ),
    )
    assert places(find_rows(table, keyed((None, "x", {"a": "NaN"})), ("a", "b"))) == {"f0": [1]}
    assert places(find_rows(table, keyed((1, "x", None)), ("a", "b"))) == {"f0": [3]}
    assert places(find_rows(table, keyed((None, "x", None)), ("a", "b"))) == {"f0": [2]}


def test_a_deleted_row_is_not_found(tmp_path: Path) -> None:
    rows = keyed(*((1, "x", None) for _ in range(5)))
    vector = write_vectors(tmp_path, [("f0", np.array([0, 3]))])["f0"]
    table = table_of(tmp_path, rows, vector=vector)
    key = keyed((1, "x", None))
    assert places(find_rows(table, key, ("a", "b"))) == {"f0": [1, 2, 4]}
    assert places(find_counted(table, key, ("a", "b"), np.array([2]))) == {"f0": [1, 2]}
    assert find_counted(table, key, ("a", "b"), np.array([0])) == []


def test_of_equal_rows_the_requested_number_is_deleted_over_all_files(tmp_path: Path) -> None:
    rows = keyed((1, "x", None), (2, "y", None), (1, "x", None))
    table = table_of(tmp_path, rows, rows, rows)
    keys = keyed((1, "x", None), (2, "y", None))
    assert places(find_counted(table, keys, ("a", "b"), np.array([3, 9]))) == {
        "f0": [0, 1, 2],
        "f1": [0, 1],
        "f2": [1],
    }


def test_files_of_others_have_times_without_a_unit_and_lack_later_columns(tmp_path: Path) -> None:
    times = [datetime(9000, 1, 1), datetime(2024, 1, 1)]  # noqa: DTZ001 such a type has no zone
    old = pa.table({"a": pa.array([1, 2]), "b": pa.array(times, LOCAL)})
    pq.write_table(old, tmp_path / "f0", use_deprecated_int96_timestamps=True)
    schema = pa.schema([("a", pa.int64()), ("b", ZONED), ("c", pa.string())])
    table = TableFiles(
        str(tmp_path), schema, schema, ("a", "b"), (ScanFile("f0", ((None, None),) * 2, None),)
    )
    keys = pa.table({"a": [1], "b": pa.array([datetime(9000, 1, 1, tzinfo=UTC)], ZONED)})
    found = find_rows(table, keys, ("a", "b"))
    assert places(found) == {"f0": [0]}
    assert read_rows(table, found, ()).known.to_pylist() == [
        {"a": 1, "b": datetime(9000, 1, 1, tzinfo=UTC), "c": None}
    ]


def test_a_key_with_a_dot_in_its_name_is_not_taken_for_a_column_inside_of_another(tmp_path: Path) -> None:
    rows = pa.table({"a": [{"b": 100}, {"b": 200}], "a.b": [1, 2], "b": ["x", "y"]})
    pq.write_table(rows, tmp_path / "f0")
    table = TableFiles(
        str(tmp_path), rows.schema, rows.schema, ("a.b",), (ScanFile("f0", ((None, None),), None),)
    )
    found = find_rows(table, pa.table({"a.b": [2, 3]}), ("a.b",))
    assert places(found) == {"f0": [1]}
    assert read_rows(table, found, ()).known.to_pylist() == rows.slice(1).to_pylist()


def test_a_missing_file_is_one_of_our_errors(tmp_path: Path) -> None:
    table = table_of(tmp_path, keyed((1, "x", None)))
    (tmp_path / "f0").unlink()
    with pytest.raises(TargetFileLostError, match="f0 of the target is missing"):
        find_rows(table, keyed((1, "x", None)), ("a", "b"))


# --- what is committed


LAYOUT = Layout(pa.schema([("a", pa.int64())]), ("a",), Mode.MIRROR)


def test_a_link_whose_answer_was_lost_is_our_own_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for an NFS client that repeats a request and learns that the file exists."""
    (tmp_path / "_delta_log").mkdir()
    link = os.link

    def answer_lost(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", answer_lost)
    monkeypatch.setattr(Path, "unlink", _refuse)  # nor does a change under the other name matter
    assert commit(tmp_path, 0, [transaction("a", Position.of(1))])
    monkeypatch.undo()
    assert not commit(tmp_path, 0, [transaction("a", Position.of(2))])


def _refuse(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_a_commit_is_visible_whole_or_not_at_all_and_never_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table(tmp_path, LAYOUT)
    ours = [
        commit_info("WRITE", {"position": "0/5"}, adds_only=True),
        transaction(APPLICATION, Position.of(5)),
    ]
    assert commit(tmp_path, 1, ours)
    assert not commit(tmp_path, 1, [transaction(APPLICATION, Position.of(9))])
    assert state_of(tmp_path).transactions == {APPLICATION: 5}
    log = tmp_path / "_delta_log"
    assert sorted(each.name for each in log.iterdir()) == [f"{number:020d}.json" for number in range(2)]

    def dies(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "link", dies)
    with pytest.raises(SinkError, match="no space"):
        commit(tmp_path, 2, ours)
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EOPNOTSUPP, "no")))
    with pytest.raises(Unsupported, match="no hard links"):
        commit(tmp_path, 2, ours)
    assert state_of(tmp_path).version == 1
    assert len(list(log.iterdir())) == 2


def test_statistics_of_a_file_that_lost_rows_are_bounds_and_keep_their_digits() -> None:
    text = '{"numRecords":3,"minValues":{"a":0.10000000000000000001,"tightBounds":true},"maxValues":{"a":2}'
    assert wide_stats(text + "}", 3) == '{"tightBounds":false,' + text[1:] + "}"
    assert wide_stats(text + ',"tightBounds":true}', 3) == text + ',"tightBounds":false}'
    assert wide_stats(text + ',"tightBounds":false}', 3) == text + ',"tightBounds":false}'
    for useless in (None, "{}", '{"numRecords":4}', '{"tightBounds":true,"numRecords":3}'):
        assert json.loads(wide_stats(useless, 3)) == {"numRecords": 3, "tightBounds": False}


def test_a_file_that_loses_rows_is_removed_with_its_old_vector_and_added_with_the_new_one() -> None:
    old = DeletionVector("u", "x" * 20, 1, 40, 1)
    new = DeletionVector("u", "y" * 20, 1, 40, 2)
    action = {
        "path": "f",
        "size": 9,
        "partitionValues": {},
        "tags": {"t": "1"},
        "modificationTime": 1,
        "deletionVector": old.document(),
    }
    remove, add = marked(DataFile(action), new, 3)
    assert remove["remove"]["deletionVector"] == old.document()
    assert (add["add"]["deletionVector"], add["add"]["tags"], add["add"]["path"]) == (
        new.document(),
        {"t": "1"},
        "f",
    )
    assert json.loads(add["add"]["stats"])["numRecords"] == 3
