"""Structured types: arrays, hstore, vectors, geometry. A value is (Postgres text, expected Python value)."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import ProtocolError, UnreadableTextError
from penstock.postgres.types.column import TypePolicy
from penstock.postgres.types.registry import TypeFact, TypeResolver, decode_column, text_type
from penstock.schema import Column

POINT = struct.pack("<dd", 1.5, -2.0)

HELD: list[tuple[str, str, Any]] = [
    ("int4[]", "{}", []),
    ("int4[]", "{1}", [1]),
    ("int4[]", "{1,-2,NULL,2147483647}", [1, -2, None, 2147483647]),
    ("int4[]", "{NULL}", [None]),
    ("bool[]", "{t,f,NULL}", [True, False, None]),
    ("float8[]", "{NaN,Infinity,-0.5}", None),
    ("text[]", "{a,b}", ["a", "b"]),
    ("text[]", '{"",NULL,"NULL",null}', ["", None, "NULL", "null"]),
    ("text[]", r'{"a,b","{c}","d\"e","f\\g","\\\\\"",h}', ["a,b", "{c}", 'd"e', "f\\g", '\\\\"', "h"]),
    ("text[]", '{" x ","é漢🙂","line\nbreak"}', [" x ", "é漢🙂", "line\nbreak"]),
    ("text[;]", "{(1,1),(0,0);(2,2),(1,1)}", ["(1,1),(0,0)", "(2,2),(1,1)"]),
    ("bytea[]", r'{"\\x00ff",NULL,"\\x"}', [b"\x00\xff", None, b""]),
    ("int4[][]", '{"{1,2}","{}",NULL}', [[1, 2], [], None]),
    ("hstore", "", []),
    ("hstore", '"a"=>"1"', {"a": "1"}),
    ("hstore", '"a"=>NULL', {"a": None}),
    ("hstore", '"a"=>NULL, "b"=>"NULL", "c"=>"", ""=>"d"', {"a": None, "b": "NULL", "c": "", "": "d"}),
    ("hstore", r'"q\"=>\"r"=>"\\, \"s\"=>NULL", "é"=>"🙂"', {'q"=>"r': '\\, "s"=>NULL', "é": "🙂"}),
    ("hstore[]", r'{"\"a\"=>\"1\"","",NULL}', [{"a": "1"}, [], None]),
    ("vector", "[1,2.5,-3e-05]", None),
    ("halfvec", "[0]", [0.0]),
    ("vector[]", '{"[1,2]","[3]"}', [[1.0, 2.0], [3.0]]),
    ("sparsevec", "{1:0.5,3:2}/5", {"dimensions": 5, "indices": [1, 3], "values": [0.5, 2.0]}),
    ("sparsevec", "{}/3", {"dimensions": 3, "indices": [], "values": []}),
    ("geometry", "0101000000" + POINT.hex().upper(), {"srid": 0, "wkb": bytes.fromhex("0101000000") + POINT}),
    (
        "geography",
        "0101000020E6100000" + POINT.hex().upper(),
        {"srid": 4326, "wkb": bytes.fromhex("0101000000") + POINT},
    ),
    (
        "geometry",
        "00A0000001000010E6" + "00" * 24,
        {"srid": 4326, "wkb": bytes.fromhex("0080000001") + b"\0" * 24},
    ),
    (
        "geometry[:]",
        "{0101000020E6100000" + POINT.hex() + ":NULL}",
        [{"srid": 4326, "wkb": bytes.fromhex("0101000000") + POINT}, None],
    ),
]

NOT_HELD = [
    ("int4[]", "{{1,2},{3,4}}", "{1}"),
    ("int4[]", "[0:1]={1,2}", "{1}"),
    ("int4[]", "[-1:0][2:3]={{1,2},{3,4}}", "{1}"),
    ("text[]", '{{"}","{"},{a,b}}', '{"{"}'),
    ("numeric[]", "{1,NaN}", "{1.5}"),
    ("date[]", "{infinity}", "{2024-01-01}"),
    ("hstore", '"a"=>1', '"a"=>"1"'),
    ("hstore", '"a"', '"a"=>"1"'),
    ("hstore", '"a"=>"1",', '"a"=>"1"'),
    ("hstore", '"a"=>"1", ', '"a"=>"1"'),
    ("hstore", '"a"=>"b"=>"c"', '"a"=>"1"'),
    ("hstore", '"a"=>"1"x', '"a"=>"1"'),
    ("hstore", '"a"=>', '"a"=>"1"'),
    ("hstore", '"a', '"a"=>"1"'),
    ("hstore", "x", '"a"=>"1"'),
    ("vector", "[1,x]", "[1]"),
    ("vector", "1,2", "[1]"),
    ("vector", "[[1],[2]]", "[1]"),
    ("vector", "", "[1]"),
    ("sparsevec", "{1:1}", "{1:1}/1"),
    ("sparsevec", "{1}/1", "{1:1}/1"),
    ("geometry", "POINT(1 2)", "0101000000"),
    ("geometry", "0901000000", "0101000000"),
    ("geometry", "0101000020E610", "0101000000"),
]

GARBAGE = [
    ("int4[]", text)
    for text in ("", "{", "}", "1", "{1", "1}", "{1}x", "{1,x}", "{1,}", "{1}{2}", "{1}}", "[0:1]=", "{1}\n")
]
GARBAGE += [("text[]", text) for text in ('{"a}', '{a"}', '{"a\\"}')]


def column(reader: str) -> Column:
    return Column("x", text_type(reader).arrow_type(-1, TypePolicy()), 99_999, -1, reader)


@pytest.mark.parametrize(("reader", "text", "value"), HELD)
def test_a_value_with_structure_is_exact(reader: str, text: str, value: Any) -> None:
    whole = pa.array([None, text, text, None, text])
    decoded = decode_column(whole, column(reader))
    decoded.values.validate(full=True)
    assert decoded.values.type == column(reader).arrow_type
    assert decoded.inexact is None or not decoded.inexact.true_count
    found = [_plain(each) for each in decoded.values.to_pylist()]
    if value is not None:
        assert found == [None, value, value, None, value]
    assert [_plain(each) for each in decode_column(whole[1:4], column(reader)).values.to_pylist()] == found[
        1:4
    ] or value is None
    assert decode_column(whole[:0], column(reader)).values.type == column(reader).arrow_type
    assert decode_column(pa.nulls(2, pa.string()), column(reader)).values.null_count == 2


def _plain(value: Any) -> Any:
    """Arrow gives maps as lists of pairs."""
    if isinstance(value, list) and value and all(isinstance(each, tuple) for each in value):
        return dict(value)
    if isinstance(value, list):
        return [_plain(each) for each in value] or []
    return value


@pytest.mark.parametrize(("reader", "text", "held"), NOT_HELD)
def test_a_value_with_another_structure_is_null_and_marked(
    reader: str, text: str, held: str, tmp_path: Any
) -> None:
    decoded = decode_column(pa.array([held, text, None, held]), column(reader))
    decoded.values.validate(full=True)
    assert decoded.values.is_valid().to_pylist() == [True, False, False, True]
    assert decoded.inexact is not None
    assert decoded.inexact.to_pylist() == [False, True, False, False]
    pq.write_table(pa.table({"x": decoded.values}), tmp_path / "x.parquet")
    assert pq.read_table(tmp_path / "x.parquet").column("x").to_pylist() == decoded.values.to_pylist()


@pytest.mark.parametrize(("reader", "text"), GARBAGE)
def test_error_of_an_invalid_array_does_not_show_it(reader: str, text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_column(pa.array([text]), column(reader))
    assert len(text) < 3 or text not in str(caught.value)


@pytest.mark.parametrize("text", [b"{\xff}", b"{{\xff}}", b'{"\xff\\""}'])
def test_T11_bytes_that_are_not_utf8_are_seen_inside_arrays_too(text: bytes) -> None:
    with pytest.raises(UnreadableTextError):
        decode_column(pa.array([text]).view(pa.string()), column("text[]"))


def test_T28_a_domain_is_its_base_type_with_the_modifier_of_the_domain() -> None:
    facts = [
        TypeFact(20001, "price", "d", 1700, (12 << 16 | 2) + 4),
        TypeFact(20002, "net_price", "d", 20001, -1),
        TypeFact(20003, "_net_price", "b", element_oid=20002),
        TypeFact(20004, "prices", "d", 20003, -1),
    ]
    types = TypeResolver(facts=facts)
    expected = {20001: "numeric", 20002: "numeric", 20003: "numeric[]", 20004: "numeric[]"}
    for oid, reader in expected.items():
        found = types.column("x", oid, -1)
        assert found.reader == reader
        assert found.arrow_type == (pa.list_(pa.decimal128(12, 2)) if "[" in reader else pa.decimal128(12, 2))


def test_a_type_created_after_the_start_is_looked_up_once() -> None:
    asked: list[list[int]] = []

    def load(oids: Any) -> list[TypeFact]:
        asked.append(list(oids))
        return [TypeFact(20001, "hstore", "b")] if 20001 in oids else []

    types = TypeResolver(load=load)
    assert [types.column("x", 20001, -1).reader for _ in range(2)] == ["hstore"] * 2
    assert [types.column("x", 20009, -1).arrow_type for _ in range(2)] == [pa.string()] * 2
    assert asked == [[20001], [20009]]


@pytest.mark.parametrize(
    ("namespace", "name", "arrow_type"),
    [
        ("", "int4", pa.int32()),
        ("pg_catalog", "_box", pa.list_(pa.string())),
        ("public", "hstore", pa.map_(pa.string(), pa.string())),
        ("public", "_vector", pa.list_(pa.list_(pa.float32()))),
        ("public", "int4", pa.string()),
        ("public", "mood", pa.string()),
    ],
)
def test_a_dropped_type_has_the_name_in_its_message(
    namespace: str, name: str, arrow_type: pa.DataType
) -> None:
    types = TypeResolver(load=lambda _: [])
    types.learn(30000, namespace, name)
    assert types.column("x", 30000, -1).arrow_type == arrow_type


@pytest.mark.parametrize("name", ["vector", "_vector", "_hstore", "_geometry"])
def test_a_value_of_a_type_that_only_its_name_tells_is_kept_as_text_if_it_is_another_one(name: str) -> None:
    types = TypeResolver(load=lambda _: [])
    types.learn(30000, "public", name)
    decoded = decode_column(pa.array(["anything", None, '{"']), types.column("x", 30000, -1))
    assert decoded.values.to_pylist() == [None, None, None]
    assert decoded.inexact is not None
    assert decoded.inexact.to_pylist() == [True, False, True]


def test_a_type_that_is_nested_without_end_is_text() -> None:
    domains = [TypeFact(20000 + at, f"d{at}", "d", base_oid=20001 + at) for at in range(5000)]
    types = TypeResolver(facts=[*domains, TypeFact(25000, "x", "e")])
    assert types.column("x", 20000, -1).arrow_type == pa.string()
    assert types.column("x", 24990, -1).arrow_type == pa.string()


def test_an_enum_of_the_name_of_an_extension_type_is_text() -> None:
    types = TypeResolver(facts=[TypeFact(20001, "vector", "e"), TypeFact(20002, "geometry", "c")])
    assert types.column("x", 20001, -1) == Column("x", pa.string(), 20001)
    assert types.column("x", 20002, -1) == Column("x", pa.string(), 20002)


@pytest.mark.parametrize("policy", ["decimal(10,2)", "decimal(38, 0)", "string"])
def test_T04_a_number_without_a_bound_is_read_as_the_policy_says(policy: str) -> None:
    found = TypeResolver(TypePolicy(policy)).column("x", 1700, -1)
    decoded = decode_column(pa.array(["1.25", "NaN", None]), found)
    if policy == "string":
        assert decoded.values.to_pylist() == ["1.25", "NaN", None]
    else:
        assert str(found.arrow_type) == policy.replace("decimal(", "decimal128(").replace("10,2", "10, 2")
        assert decoded.inexact is not None
        assert decoded.inexact.to_pylist() == [policy.endswith("0)"), True, False]


@pytest.mark.parametrize("policy", ["decimal(39,2)", "decimal(5,6)", "decimal(0,0)", "text", ""])
def test_a_policy_that_spark_has_no_type_for_is_refused(policy: str) -> None:
    with pytest.raises(ValueError, match="numeric is"):
        TypePolicy(policy)
