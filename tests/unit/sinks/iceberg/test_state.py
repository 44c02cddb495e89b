"""Properties of an Iceberg table, read without Spark and without a JVM."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import SinkRefusedError, TargetForeignError
from penstock.position import Position
from penstock.schema import GEOMETRY_TYPE, TableName
from penstock.sinks.base import SnapshotPlace
from penstock.sinks.iceberg.schema import (
    check_names,
    delete_columns,
    field_ids,
    fitted,
    own_names,
    parse_columns,
    stored_name,
    type_document,
)
from penstock.sinks.iceberg.state import (
    COPY,
    POSITION,
    SNAPSHOT,
    HadoopTargets,
    SnapshotMark,
    ancestors_of,
    find_applied,
    find_version,
    identifier,
    identity_properties,
    position_properties,
)
from penstock.sinks.lineage import Origin, OriginColumn
from penstock.sinks.modes import Layout, Mode
from penstock.sinks.row_files import write_batches

TABLE = TableName("public", "items")
COLUMNS = pa.schema(
    [
        pa.field("id", pa.int16()),
        pa.field("a.b", pa.list_(pa.int32())),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("shape", GEOMETRY_TYPE),
        pa.field("size", pa.decimal128(38, 18)),
    ]
)
LAYOUT = Layout(COLUMNS, ("id",), Mode.SOFT_DELETE)
ORIGIN = Origin({1: OriginColumn("id", 21, -1, "id")}, 5, "heap")


def mark(number: int, position: int | None = None) -> SnapshotMark:
    return SnapshotMark(
        number, number - 1 if number > 1 else None, None if position is None else Position.of(position)
    )


def at(position: int | None) -> Position | None:
    return None if position is None else Position.of(position)


def saved(position: int, snapshot: int) -> dict[str, str]:
    return position_properties(Position.of(position), snapshot)


@pytest.mark.parametrize(
    ("marks", "properties", "applied"),
    [
        ([], {}, None),
        ([mark(2, 200), mark(1, 100)], saved(100, 1), 200),
        ([mark(3), mark(2, 200), mark(1, 100)], {}, 200),
        ([mark(1, 100)], saved(200, 2), 100),  # rolled back: the current contents count, not earlier ones
        ([mark(5)], saved(300, 4), 300),  # compacted, and all before it expired
        ([mark(3)], saved(300, 4), None),  # rolled back to a snapshot without a position
        ([SnapshotMark(5, 3, None)], saved(300, 4), None),  # and compacted after that
        ([mark(5)], {}, None),
        ([mark(1)], saved(300, 1), None),  # another writer's first snapshot
        ([mark(2, 0), mark(1, 100)], saved(0, 2), None),  # disowned
    ],
    ids=[
        "none",
        "own",
        "compacted",
        "rolled back",
        "expired",
        "rolled back and expired",
        "and compacted",
        "foreign",
        "foreign first",
        "disowned",
    ],
)
def test_the_position_is_that_of_our_nearest_commit(
    marks: list[SnapshotMark], properties: dict[str, str], applied: int | None
) -> None:
    assert find_applied(marks, properties) == at(applied)


@pytest.mark.parametrize(
    ("position", "version"),
    [(400, 6), (399, 4), (300, 4), (250, 2), (200, 2), (199, 1), (100, 1), (99, None)],
    ids=str,
)
def test_a_version_is_the_newest_that_holds_nothing_later(position: int, version: int | None) -> None:
    marks = [mark(6), mark(5, 400), mark(4), mark(3, 300), mark(2, 200), mark(1, 100)]
    assert find_version(marks, {}, Position.of(position)) == version


def test_a_version_whose_commit_has_expired_is_known_by_the_tables_property() -> None:
    marks = [mark(6, 500), mark(5)]
    assert find_version(marks, saved(500, 6), Position.of(450)) is None
    assert find_version([mark(5)], saved(400, 4), Position.of(450)) == 5
    assert find_version([mark(5)], saved(400, 4), Position.of(399)) is None


def metadata(properties: Mapping[str, str], *marks: SnapshotMark) -> dict[str, Any]:
    snapshots = [
        {
            "snapshot-id": each.id,
            "summary": {
                "operation": "append",
                **({} if each.position is None else {POSITION: str(each.position)}),
            },
            **({} if each.parent is None else {"parent-snapshot-id": each.parent}),
        }
        for each in marks
    ]
    current = {"current-snapshot-id": marks[0].id} if marks else {"current-snapshot-id": None}
    return {"format-version": 2, "properties": dict(properties), "snapshots": snapshots, **current}


def test_ancestors_are_read_from_the_metadata_as_iceberg_writes_it() -> None:
    marks = [mark(3), mark(2, 200), mark(1, 100)]
    assert list(ancestors_of(metadata({}, *marks))) == marks
    assert list(ancestors_of(metadata({}))) == []
    assert list(ancestors_of({"current-snapshot-id": -1})) == []


def _write(directory: Path, version: int, document: Mapping[str, Any]) -> None:
    (directory / "metadata").mkdir(parents=True, exist_ok=True)
    (directory / "metadata" / f"v{version}.metadata.json").write_text(json.dumps(document))


def test_a_table_of_a_hadoop_catalog_is_known_without_spark(tmp_path: Path) -> None:
    targets = HadoopTargets(tmp_path, ("shop",), "p")
    assert targets.load_target(TABLE) is None
    properties = identity_properties("p", LAYOUT, 42, ORIGIN)
    directory = tmp_path / "shop" / "public" / "items"
    assert targets.describe(TABLE) == str(directory)
    _write(directory, 9, metadata(properties))
    begun = targets.load_target(TABLE)
    assert begun is not None
    assert begun.applied is None
    _write(directory, 10, metadata(properties | {SNAPSHOT: "1", COPY: "c0ffee"}, mark(1, 100)))
    (directory / "metadata" / "v.metadata.json").write_text("not a version")
    target = targets.load_target(TABLE)
    assert target is not None
    assert (target.source_oid, target.key, target.applied) == (42, ("id",), Position.of(100))
    assert target.schema.equals(COLUMNS)
    assert (target.mode, target.origin) == (Mode.SOFT_DELETE, ORIGIN)
    assert (begun.copy, target.copy) == (None, "c0ffee")
    assert target.schema.field("shape").type.field("wkb").metadata, (
        "properties that pyspark needs of a type are kept too"
    )


def test_k10_a_table_of_another_or_of_no_pipeline_is_refused_without_spark(tmp_path: Path) -> None:
    _write(tmp_path / "public" / "items", 1, metadata(identity_properties("other", LAYOUT, 42, None)))
    _write(tmp_path / "public" / "theirs", 1, metadata({}))
    targets = HadoopTargets(tmp_path, (), "p")
    with pytest.raises(TargetForeignError, match="'other'"):
        targets.load_target(TABLE)
    with pytest.raises(TargetForeignError, match="not Penstock"):
        targets.load_target(TableName("public", "theirs"))


def test_names_in_a_catalog_stay_separate_and_make_no_directories() -> None:
    names = [
        TableName("a/b", "c"),
        TableName("a", "b/c"),
        TableName("a", "b"),
        TableName("..", "b"),
        TableName("A", "b"),
    ]
    found = {identifier(("top",), name) for name in names}
    assert len(found) == len(names)
    assert all("/" not in part and part != ".." for parts in found for part in parts)


FIELDS = {
    "fields": [
        {"id": 7, "name": "id", "required": False, "type": "int"},
        {
            "id": 2,
            "name": "a.b",
            "required": False,
            "type": {"type": "list", "element-id": 9, "element": "int", "element-required": False},
        },
        {"id": 3, "name": "at", "required": False, "type": "timestamptz"},
        {
            "id": 4,
            "name": "shape",
            "required": False,
            "type": {
                "type": "struct",
                "fields": [
                    {"id": 10, "name": "srid", "required": False, "type": "int"},
                    {"id": 11, "name": "wkb", "required": False, "type": "binary"},
                ],
            },
        },
        {"id": 5, "name": "size", "required": False, "type": "decimal(38, 18)"},
        {
            "id": 6,
            "name": "_exact",
            "required": False,
            "type": {
                "type": "map",
                "key-id": 12,
                "key": "string",
                "value-id": 13,
                "value": "string",
                "value-required": False,
            },
        },
    ]
}


def test_files_carry_the_ids_of_all_fields_those_within_columns_too(tmp_path: Path) -> None:
    columns = parse_columns(FIELDS)
    rows = pa.table(
        {
            "_exact": pa.array([[("size", "NaN")], None], pa.map_(pa.string(), pa.string())),
            "id": pa.array([1, None], pa.int16()),
            "a.b": pa.array([[1, None], None], pa.list_(pa.int16())),
            "at": pa.array([0, None], pa.timestamp("us", "UTC")),
            "shape": pa.array([{"srid": 1, "wkb": b"x"}, None], GEOMETRY_TYPE),
            "size": pa.array([None, None], pa.decimal128(38, 18)),
        }
    )
    path = tmp_path / "rows.parquet"
    pq.write_table(fitted(rows, columns), path)
    text = str(pq.ParquetFile(path).schema)
    assert all(f"field_id={number} " in text for number in range(2, 14) if number != 8)
    assert pq.read_table(path).column("a.b").to_pylist() == [[1, None], None]
    assert field_ids(columns, ["size", "id"]) == [5, 7]


def test_chunks_of_a_snapshot_are_written_with_the_types_and_ids_of_the_table(tmp_path: Path) -> None:
    """A smallint is an int in Iceberg, in lists too."""
    columns = pa.schema([parse_columns(FIELDS).field(name) for name in ("id", "a.b", "shape")])
    chunk = pa.record_batch(
        [pa.array([1], pa.int16()), pa.array([[2]], pa.list_(pa.int16())), pa.array([None], GEOMETRY_TYPE)],
        names=["id", "a.b", "shape"],
    )
    file = write_batches(iter([chunk]), SnapshotPlace(str(tmp_path), columns, "snapshot"), 0)
    found = pq.ParquetFile(tmp_path / file.name)
    assert "int32 field_id=7 id;" in str(found.schema)
    assert "int32 field_id=9 element;" in str(found.schema)
    assert found.read().to_pylist() == [{"id": 1, "a.b": [2], "shape": None}]


@pytest.mark.parametrize(
    ("name", "mode"), [("_Pos", Mode.MIRROR), ("_deleted", Mode.HISTORY), ("_is_deleted", Mode.SOFT_DELETE)]
)
def test_K14_a_column_whose_name_iceberg_needs_is_refused(name: str, mode: Mode) -> None:
    layout = Layout(pa.schema([("id", pa.int32()), (name, pa.int32())]), ("id",), mode)
    with pytest.raises(SinkRefusedError, match=name):
        check_names(layout, "lake.public.t")
    check_names(
        Layout(pa.schema([("id", pa.int32()), ("_is_deleted", pa.int32())]), ("id",), Mode.MIRROR),
        "lake.public.t",
    )


def test_names_that_iceberg_spells_differently_are_recognised() -> None:
    layout = Layout(pa.schema([("id", pa.int32())]), ("id",), Mode.SOFT_DELETE)
    stored = pa.schema([field.with_name(stored_name(field.name, layout.mode)) for field in layout.schema])
    assert stored.names == ["id", "_is_deleted", "_deleted_at", "_exact"]
    assert own_names(stored, layout.mode).equals(layout.schema)
    assert own_names(stored, Mode.MIRROR) is stored


def test_only_plain_exact_columns_name_rows_in_deletes() -> None:
    columns = pa.schema(
        [
            ("number", pa.int64()),
            ("share", pa.float64()),
            ("list", pa.list_(pa.int32())),
            ("text", pa.string()),
            ("sum", pa.decimal128(9, 2)),
        ]
    )
    assert delete_columns(columns, ["text", "share", "number"]) == ("text", "number")
    assert delete_columns(columns, ["list", "share"]) == ()
    assert delete_columns(columns, ["sum"]) == ("sum",)


def test_a_type_that_our_tables_never_have_is_named() -> None:
    with pytest.raises(ValueError, match="uuid"):
        parse_columns({"fields": [{"id": 1, "name": "x", "type": "uuid"}]})


@pytest.mark.parametrize(
    "kind",
    [
        pa.int64(),
        pa.timestamp("us"),
        pa.timestamp("us", "UTC"),
        pa.decimal128(20, 3),
        GEOMETRY_TYPE,
        pa.list_(
            pa.list_(
                pa.struct([pa.field("a", pa.string()), pa.field("b", pa.map_(pa.string(), pa.float32()))])
            )
        ),
    ],
    ids=str,
)
def test_a_type_is_written_as_it_is_read(kind: pa.DataType) -> None:
    columns = parse_columns({"fields": [{"id": 1, "name": "x", "type": type_document(kind)}]})
    assert columns.field("x").type == kind
    written = json.dumps(type_document(kind))
    numbers = [int(each) for each in re.findall(r'id": (\d+)', written)]
    assert len(numbers) == len(set(numbers)), "no number is used for two columns"
    assert type_document(pa.int16()) == "int"
    with pytest.raises(ValueError, match="no type"):
        type_document(pa.list_(pa.uint64()))
