"""Rows of an Iceberg table looked up by key in its files, against a model, after any order of inserts and
deletes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import TargetFileLostError
from penstock.sinks.iceberg import lookup
from penstock.sinks.iceberg.lookup import FindTask, LakeFile, find_rows
from penstock.sinks.iceberg.schema import FIELD_ID
from penstock.sinks.keys import key_codes

Row = tuple[int | None, str | None, int]
Key = tuple[int | None, str | None]
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), metadata={FIELD_ID: b"1"}),
        pa.field("a.b", pa.string(), metadata={FIELD_ID: b"2"}),
        pa.field("value", pa.int32(), metadata={FIELD_ID: b"3"}),
        pa.field("more", pa.string(), metadata={FIELD_ID: b"7"}),
    ]
)
FORMER = pa.schema([SCHEMA.field(1).with_name("was"), SCHEMA.field(2), SCHEMA.field(0).with_type(pa.int32())])
"""Files written before a column was renamed, one widened and one added."""

_ids, _texts = st.one_of(st.none(), st.integers(0, 2)), st.one_of(st.none(), st.just("x"))
_keys = st.lists(st.tuples(_ids, _texts), max_size=4)
_rows = st.lists(st.tuples(_ids, _texts, st.integers(0, 3)), max_size=6)
_epochs = st.lists(st.tuples(_keys, _rows, st.booleans()), min_size=1, max_size=5)
"""The keys an epoch deletes, the rows it inserts, and whether its files predate the column change."""


def _write(path: Path, schema: pa.Schema, values: Mapping[str, Sequence[object]]) -> None:
    arrays = [
        pa.array(values.get(field.metadata[FIELD_ID].decode(), [None] * len(values["1"])), field.type)
        for field in schema
    ]
    pq.write_table(pa.table(arrays, schema=schema), path, row_group_size=2)


def _by_number(rows: Sequence[Key] | Sequence[Row]) -> dict[str, list[object]]:
    return {str(at): list(column) for at, column in enumerate(zip(*rows, strict=True), 1)}


@given(_epochs, _keys.filter(bool), st.booleans())
def test_rows_are_those_that_have_one_of_the_keys_and_that_no_later_delete_names(
    epochs: list[tuple[list[Key], list[Row], bool]], wanted: list[Key], by_id_alone: bool
) -> None:
    """An epoch's deletes and inserts have one sequence number: a delete does not reach rows of the same
    epoch.
    """
    held: list[Row] = []
    files: list[LakeFile] = []
    deletes: list[LakeFile] = []
    names = ("id",) if by_id_alone else ("id", "a.b")
    with tempfile.TemporaryDirectory(prefix="penstock-lookup-") as place:
        for sequence, (gone, rows, is_former) in enumerate(epochs, 1):
            path = Path(place) / f"{sequence}"
            if gone:
                _write(
                    path.with_suffix(".deletes"),
                    pa.schema([SCHEMA.field(name) for name in names]),
                    _by_number(gone),
                )
                deletes.append(
                    LakeFile(str(path.with_suffix(".deletes")), sequence, (1,) if by_id_alone else (1, 2))
                )
            if rows:
                _write(path.with_suffix(".rows"), FORMER if is_former else SCHEMA, _by_number(rows))
                files.append(LakeFile(str(path.with_suffix(".rows")), sequence))
            named = {key[: len(names)] for key in gone}
            held = [*(row for row in held if row[: len(names)] not in named), *rows]
        keys = Path(place) / "keys.parquet"
        arrays = [
            pa.array([key[at] for key in wanted], SCHEMA.field(name).type) for at, name in enumerate(names)
        ]
        pq.write_table(pa.table(arrays, names=[f"k_{at}" for at in range(len(names))]), keys)
        found = find_rows(
            FindTask(tuple(files), tuple(deletes), names, (str(keys),), SCHEMA, f"{place}/found")
        )
        assert found.is_known
        shown = (
            []
            if found.path is None
            else [tuple(row.values()) for row in pq.read_table(found.path).to_pylist()]
        )
    asked = {key[: len(names)] for key in wanted}
    assert sorted(shown, key=repr) == sorted(
        ((*row, None) for row in held if row[: len(names)] in asked), key=repr
    )


def test_a_file_whose_columns_have_no_numbers_is_left_to_others(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": pa.array([1], pa.int64())}), tmp_path / "theirs.parquet")
    pq.write_table(pa.table({"k_0": pa.array([1], pa.int64())}), tmp_path / "keys.parquet")
    theirs = LakeFile(str(tmp_path / "theirs.parquet"), 1)
    found = find_rows(
        FindTask((theirs,), (), ("id",), (str(tmp_path / "keys.parquet"),), SCHEMA, str(tmp_path / "found"))
    )
    assert (found.path, found.is_known) == (None, False)


def test_deletes_are_read_some_at_a_time_however_many_the_table_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 4
    sizes: list[int] = []

    def counted(tables: Sequence[pa.Table], names: Sequence[str]) -> object:
        sizes.append(tables[-1].num_rows)
        return key_codes(tables, names)

    monkeypatch.setattr(lookup, "_DELETES_AT_ONCE", limit)
    monkeypatch.setattr(lookup, "key_codes", counted)
    _write(tmp_path / "rows", SCHEMA, {"1": list(range(20)), "3": [0] * 20})
    deletes = []
    for sequence in range(2, 7):
        path = tmp_path / f"{sequence}.deletes"
        _write(path, pa.schema([SCHEMA.field("id")]), {"1": list(range(3 * sequence))})
        deletes.append(LakeFile(str(path), sequence, (1,)))
    pq.write_table(pa.table({"k_0": pa.array(range(20), pa.int64())}), tmp_path / "keys.parquet")
    rows = LakeFile(str(tmp_path / "rows"), 1)
    found = find_rows(
        FindTask(
            (rows,),
            tuple(deletes),
            ("id",),
            (str(tmp_path / "keys.parquet"),),
            SCHEMA,
            str(tmp_path / "found"),
        )
    )
    assert found.path is not None
    assert pq.read_table(found.path).column("v_0").to_pylist() == [18, 19]
    assert max(sizes) <= limit + 1, "a row group of two rows may be read beyond the limit"


def test_a_small_table_whose_files_are_lost_or_large_is_not_read(tmp_path: Path) -> None:
    _write(tmp_path / "rows", SCHEMA, {"1": [1, 2], "3": [0, 0]})
    _write(tmp_path / "deletes", pa.schema([SCHEMA.field("id")]), {"1": [2]})
    rows, deletes = LakeFile(str(tmp_path / "rows"), 1), LakeFile(str(tmp_path / "deletes"), 2, (1,))
    found = lookup.read_all([rows], [deletes], SCHEMA, 1 << 20)
    assert found is not None
    assert found.column("id").to_pylist() == [1]
    assert lookup.read_all([rows], [deletes], SCHEMA, (tmp_path / "rows").stat().st_size) is None
    (tmp_path / "deletes").unlink()
    with pytest.raises(TargetFileLostError, match="deletes of the target is missing"):
        lookup.read_all([rows], [deletes], SCHEMA, 1)
