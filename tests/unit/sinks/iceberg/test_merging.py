"""Which files of an Iceberg table are merged, and the rows of the merged file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.change import EXACT
from penstock.sinks.base import SnapshotPlace
from penstock.sinks.iceberg.files import MergeTask, merge_files
from penstock.sinks.iceberg.maintenance import small_enough
from penstock.sinks.iceberg.schema import parse_columns

MB = 1 << 20
EXACT_FIELD = {
    "type": "map",
    "key-id": 11,
    "key": "string",
    "value-id": 12,
    "value-required": False,
    "value": "string",
}


def _columns(*types: str) -> pa.Schema:
    fields = [
        {"id": at, "name": f"c{at}", "required": False, "type": each}
        for at, each in enumerate(types, start=1)
    ]
    return parse_columns(
        {
            "type": "struct",
            "fields": [*fields, {"id": 10, "name": EXACT, "required": False, "type": EXACT_FIELD}],
        }
    )


def _file(directory: Path, name: str, schema: pa.Schema, *rows: tuple[object, ...]) -> str:
    columns = [
        pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)
    ]
    pq.write_table(pa.table(columns, schema=schema), directory / name)
    return str(directory / name)


def test_one_file_has_the_rows_of_all_and_the_columns_of_the_table(tmp_path: Path) -> None:
    schema = _columns("long", "string")
    rows = [(1, "a", None), (2, None, [("c1", "1e90")]), (3, "c", None)]
    files = (_file(tmp_path, "a.parquet", schema, *rows[:2]), _file(tmp_path, "b.parquet", schema, rows[2]))
    made = merge_files(MergeTask(files, SnapshotPlace(str(tmp_path), schema, "merged")))
    assert made is not None
    found = pq.read_table(tmp_path / made.name)
    assert [tuple(row.values()) for row in found.to_pylist()] == rows
    assert [field.metadata for field in found.schema] == [field.metadata for field in schema]
    assert (made.rows, made.bytes) == (3, (tmp_path / made.name).stat().st_size)


@pytest.mark.parametrize(
    "former", [_columns("int", "string"), _columns("long"), _columns("long", "string").remove(2)]
)
def test_files_from_before_the_columns_changed_are_for_others_to_read(
    tmp_path: Path, former: pa.Schema
) -> None:
    schema = _columns("long", "string")
    row = (1, "a", None)
    values = tuple(None if field.name == EXACT else row[at] for at, field in enumerate(former))
    files = (_file(tmp_path, "new.parquet", schema, row), _file(tmp_path, "old.parquet", former, values))
    place = SnapshotPlace(str(tmp_path), schema, "merged")
    assert merge_files(MergeTask(files, place)) is None
    assert merge_files(MergeTask(files[:1], place)) is not None


@pytest.mark.parametrize(
    ("sizes", "below"),
    [
        ([20_000] * 64, 16 * MB),
        ([], 16 * MB),
        ([20_000] * 64 + [10 * MB], 10 * MB),
        ([3 * MB, 20_000, 3 * MB, 4 * MB, 11 * MB], 16 * MB),
        ([20_000] * 5 + [3 * MB, 12 * MB], 3 * MB),
        ([2 * MB] * 64, 16 * MB),
    ],
)
def test_a_file_is_rewritten_once_smaller_ones_add_up_to_its_size(sizes: list[int], below: int) -> None:
    assert small_enough(sizes, 16 * MB) == below


@pytest.mark.parametrize("size", [20_000, MB // 4, 3 * MB])
def test_repeated_compaction_writes_rows_a_few_times_and_leaves_a_few_files(size: int) -> None:
    files: list[int] = []
    written = 0
    for _ in range(200):
        files += [size] * 64
        below = small_enough(files, 16 * MB)
        merged = sum(each for each in files if each < below)
        files = [each for each in files if each >= below] + [merged]
        written += merged
        assert len([each for each in files if each < 16 * MB]) < 30
    assert written < 8 * sum(files)
