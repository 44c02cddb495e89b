from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from penstock.arrow import parse_type, type_text
from penstock.change import ChangeCounts, LogicalMessage
from penstock.errors import SpoolCorruptError, SpoolFormatError
from penstock.position import Lsn
from penstock.schema import GEOMETRY_TYPE, Column, TableName, TableSchema
from penstock.spool.manifest import FORMAT, Manifest, SegmentFile, dump_manifest, parse_manifest
from tests.support.spool.builders import ORDERS, at, time_of

COUNTS = ChangeCounts(inserts=3, updates=2, deletes=1, moves=1, unchanged=2)
ODD = TableSchema(1, TableName('Ünï."x"', "a b"), (Column("è", pa.struct([("x", pa.int8())]), 99, 4),), ())


def _manifest() -> Manifest:
    return Manifest(
        at(5),
        at(1 << 40),
        3,
        time_of(9),
        (
            SegmentFile(ORDERS, "a.parquet", 6, 1234, COUNTS, at(6), at(9)),
            SegmentFile(
                ODD, "b.parquet", 0, 1, ChangeCounts(), at(9), at(9), at(9), time_of(9), 4_000_000_000
            ),
        ),
        (LogicalMessage("é", b"\0\xff", Lsn(7), 12, 3, at(9)), LogicalMessage("", b"", Lsn(8))),
    )


def test_a_manifest_survives_its_own_text() -> None:
    assert parse_manifest(dump_manifest(_manifest()), where="here") == _manifest()


def test_a_manifest_from_before_columns_named_their_readers_is_read() -> None:
    document = json.loads(dump_manifest(_manifest()))
    for file in document["files"]:
        for column in file["columns"]:
            column.pop("reader", None)
        for count in ("inexact", "unreadable"):
            file["counts"].pop(count)
    found = parse_manifest(json.dumps(document).encode(), where="here")
    assert {column.reader for file in found.files for column in file.schema.columns} == {""}
    assert {file.counts.inexact + file.counts.unreadable for file in found.files} == {0}


def test_the_reader_of_a_column_survives() -> None:
    file = _manifest().files[0]
    columns = (*file.schema.columns, Column("tags", pa.map_(pa.string(), pa.string()), 20001, -1, "hstore"))
    manifest = replace(_manifest(), files=(replace(file, schema=replace(file.schema, columns=columns)),))
    assert parse_manifest(dump_manifest(manifest), where="here") == manifest


def test_an_empty_segment_survives_its_own_text() -> None:
    empty = Manifest(at(5), at(6), 0, None, ())
    assert parse_manifest(dump_manifest(empty), where="here") == empty


def test_the_keys_of_a_manifest_have_a_fixed_order() -> None:
    document = json.loads(dump_manifest(_manifest()))
    assert list(document) == ["format", "start", "end", "transactions", "commit_time", "files", "messages"]
    assert list(document["files"][0])[:5] == ["table", "oid", "key", "columns", "path"]


def test_a_newer_format_is_refused_with_a_hint() -> None:
    newer = json.loads(dump_manifest(_manifest())) | {"format": FORMAT + 1}
    with pytest.raises(SpoolFormatError, match=f"has format {FORMAT + 1}") as caught:
        parse_manifest(json.dumps(newer).encode(), where="segment X")
    assert caught.value.hint


def test_a_manifest_of_format_1_is_still_read() -> None:
    document = json.loads(dump_manifest(_manifest())) | {"format": 1}
    del document["messages"]
    for file in document["files"]:
        del file["xid"]
    whole = _manifest()
    files = tuple(replace(file, xid=None) for file in whole.files)
    assert parse_manifest(json.dumps(document).encode(), where="here") == replace(
        whole, files=files, messages=()
    )


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"format":1}', b'{"format":1,"start":"x"}', b'{"format":null}']
)
def test_invalid_manifest_is_called_corrupt(data: bytes) -> None:
    with pytest.raises(SpoolCorruptError, match="segment X"):
        parse_manifest(data, where="segment X")


@pytest.mark.parametrize(
    ("arrow_type", "text"),
    [
        (pa.int64(), "int64"),
        (pa.float64(), "double"),
        (pa.timestamp("us", "UTC"), "timestamp[us, tz=UTC]"),
        (pa.timestamp("us"), "timestamp[us]"),
        (pa.decimal128(38, 10), "decimal128(38, 10)"),
        (pa.decimal256(60, 0), "decimal256(60, 0)"),
        (pa.list_(pa.list_(pa.decimal128(5, 2))), "list<item: list<item: decimal128(5, 2)>>"),
        (pa.timestamp("us", "Europe/Paris"), None),
        (pa.list_(pa.field("item", pa.int8(), nullable=False)), None),
        (pa.struct([pa.field("a", pa.int32()), pa.field("b, c", pa.string())]), None),
        (pa.map_(pa.string(), pa.string()), "map<string, string>"),
        (pa.list_(pa.map_(pa.string(), pa.decimal128(5, 2))), "list<item: map<string, decimal128(5, 2)>>"),
        (
            pa.struct([("a", pa.int32()), ("b", pa.list_(pa.decimal128(5, 2)))]),
            "struct<a: int32, b: list<item: decimal128(5, 2)>>",
        ),
        (GEOMETRY_TYPE, "struct<srid: int32, wkb: binary>"),
        (pa.map_(pa.string(), pa.field("value", pa.string(), nullable=False)), None),
        (pa.binary(16), None),
    ],
)
def test_every_type_is_read_back_from_its_text(arrow_type: Any, text: str | None) -> None:
    assert parse_type(type_text(arrow_type)) == arrow_type
    assert type_text(arrow_type) == text or (text is None and type_text(arrow_type).startswith("ipc:"))


def test_the_metadata_of_a_schema_is_read_back_too() -> None:
    assert (
        parse_type(type_text(pa.list_(GEOMETRY_TYPE))).value_type.field("wkb").metadata
        == GEOMETRY_TYPE.field("wkb").metadata
    )


def test_manifests_that_say_the_same_of_a_table_share_its_schema() -> None:
    one, two = (
        parse_manifest(dump_manifest(replace(_manifest(), transactions=count)), where="here")
        for count in (1, 2)
    )
    assert [file.schema is other.schema for file, other in zip(one.files, two.files, strict=True)] == [
        True,
        True,
    ]
