"""T21–T31: extension types, enums, domains, composites and arrays. Each pair is (SQL, expected value in
snapshot and stream).
"""

from __future__ import annotations

import struct
from datetime import date
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import UnsupportedTableError
from penstock.postgres.catalog import check_mirrorable
from penstock.schema import GEOMETRY_TYPE
from tests.support.types.both_paths import BothPaths, Exactly

Values = dict[str, list[tuple[str, Any]]]

POINT = struct.pack("<dd", 2.5, -1)


def create_like_text(paths: BothPaths, name: str, delimiter: str = ",") -> None:
    """A base type that stands in for an extension that is not installed; its input equals its output, so
    tests write the extension's text.
    """
    schema, _, plain = name.rpartition(".")
    functions = f"{schema}.{plain}" if schema else plain
    paths.database.execute(f"CREATE TYPE {name}")
    for way, taken, given, internal in (
        ("in", "cstring", name, "textin"),
        ("out", name, "cstring", "textout"),
    ):
        paths.database.execute(
            f"CREATE FUNCTION {functions}_{way}({taken}) RETURNS {given} "
            f"LANGUAGE internal IMMUTABLE STRICT AS '{internal}'"
        )
    paths.database.execute(
        f"CREATE TYPE {name} (INPUT = {functions}_in, OUTPUT = {functions}_out, DELIMITER = '{delimiter}')"
    )


def test_T21_shapes_are_wkb_with_their_srid_in_any_schema(paths: BothPaths) -> None:
    paths.database.execute("CREATE SCHEMA gis")
    create_like_text(paths, "geometry", ":")
    create_like_text(paths, "gis.geography", ":")
    plain, polygon = bytes.fromhex("0101000000") + POINT, struct.pack("<BII", 1, 0x80000003, 0)
    values: list[tuple[str, Any]] = [
        (f"'{plain.hex().upper()}'", {"srid": 0, "wkb": plain}),
        (f"'0101000020E6100000{POINT.hex().upper()}'", {"srid": 4326, "wkb": plain}),
        (f"'{struct.pack('<BIII', 1, 0xA0000003, 3857, 0).hex().upper()}'", {"srid": 3857, "wkb": polygon}),
        ("'not a shape'", Exactly("not a shape")),
    ]
    schema = paths.check({"geometry": values, "gis.geography": values})
    assert [column.arrow_type for column in schema.columns[1:4]] == [
        GEOMETRY_TYPE,
        GEOMETRY_TYPE,
        pa.list_(GEOMETRY_TYPE),
    ]
    assert [column.reader for column in schema.columns[1:]] == [
        "geometry",
        "geography",
        "geometry[:]",
        "geography[:]",
    ]


@pytest.mark.versions(15, 18)
def test_T22_ranges_and_multiranges_are_their_text(paths: BothPaths) -> None:
    def same(*texts: str) -> list[tuple[str, Any]]:
        return [(f"'{text}'", text) for text in texts]

    columns: Values = {
        "int4range": same("[1,10)", "empty", "(,)", "[1,)"),
        "int8range": same("[-9223372036854775808,0)"),
        "numrange": same("[1.50,2.5]", "(,1)"),
        "daterange": same("[2024-01-01,infinity)"),
        "tsrange": same('["2024-01-01 00:00:00","2024-01-02 00:00:00.5")'),
        "tstzrange": [("'[2024-01-01 00:00:00+01,)'", '["2023-12-31 23:00:00+00",)')],
        "int4multirange": same("{}", "{[1,3),[5,7)}"),
        "nummultirange": same("{(,)}"),
        "tstzmultirange": [("'{[2024-01-01 00:00:00+01,)}'", '{["2023-12-31 23:00:00+00",)}')],
        "datemultirange": same("{[2024-01-01,2024-02-01)}"),
    }
    paths.check(columns)
    paths.check_key({"int4range": columns["int4range"], "int4multirange": columns["int4multirange"]})


@pytest.mark.versions(15)
def test_T23_hstore_is_a_map(paths: BothPaths) -> None:
    paths.database.execute("CREATE EXTENSION IF NOT EXISTS hstore")
    values: list[tuple[str, Any]] = [
        ("''", {}),
        ("""'a=>1, b=>NULL, "c"=>"NULL"'""", {"a": "1", "b": None, "c": "NULL"}),
        (r"""hstore(E'q"=>\\ ,', E'{}"\\''\n🙂')""", {'q"=>\\ ,': "{}\"\\'\n🙂"}),
        ("""hstore('', '')""", {"": ""}),
        ("""hstore('big', repeat('x', 100000))""", {"big": "x" * 100_000}),
    ]
    assert paths.check({"hstore": values}).columns[1].arrow_type == pa.map_(pa.string(), pa.string())
    paths.database.execute("CREATE TABLE hstore_key (x hstore PRIMARY KEY, y int DEFAULT 1)")
    with pytest.raises(UnsupportedTableError, match="'x', which is stored as a map"):
        check_mirrorable(paths.catalog("hstore_key")[1])


@pytest.mark.versions(15)
def test_T24_other_extension_types_are_their_text(paths: BothPaths) -> None:
    for extension in ("citext", "ltree", "isn", "cube", "pg_trgm", "seg"):
        paths.database.execute(f"CREATE EXTENSION {extension}")
    columns: Values = {
        "citext": [("'MiXed'", "MiXed")],
        "ltree": [("'Top.Science'", "Top.Science")],
        "lquery": [("'Top.*{1,2}'", "Top.*{1,2}")],
        "isbn": [("'978-0-393-04002-9'", "0-393-04002-X")],
        "ean13": [("'978-0-393-04002-9'", "978-0-393-04002-9")],
        "cube": [("'(1,2),(3,4)'", "(1, 2),(3, 4)")],
        "seg": [("'1.0 .. 2.50'", "1.0 .. 2.50")],
    }
    paths.check(columns)
    paths.check_key(
        {name: values for name, values in columns.items() if name in ("citext", "ltree", "ean13", "cube")}
    )


@pytest.mark.versions(16, 18)
def test_T25_vectors_are_lists_and_sparse_ones_structs(paths: BothPaths) -> None:
    paths.database.execute("CREATE EXTENSION IF NOT EXISTS vector")
    columns: Values = {
        "vector": [("'[1,2.5,-3e-5]'", [1.0, 2.5, -2.9999999242136255e-05]), ("'[0]'", [0.0])],
        "vector(2)": [("'[1,2]'", [1.0, 2.0])],
        "halfvec(3)": [("'[1,2,65504]'", [1.0, 2.0, 65504.0])],
        "sparsevec": [
            ("'{1:1.5,3:2}/5'", {"dimensions": 5, "indices": [1, 3], "values": [1.5, 2.0]}),
            ("'{}/3'", {"dimensions": 3, "indices": [], "values": []}),
        ],
    }
    schema = paths.check(columns)
    assert schema.columns[1].arrow_type == pa.list_(pa.float32())
    paths.check_key({"vector": columns["vector"], "sparsevec": columns["sparsevec"]})


def test_T25_another_type_of_the_same_name_is_its_text(paths: BothPaths) -> None:
    paths.database.execute("CREATE SCHEMA own")
    create_like_text(paths, "own.vector")
    paths.check(
        {"own.vector": [("'<1 2>'", Exactly("<1 2>")), ("'[1,2'", Exactly("[1,2")), ("'[1]'", [1.0])]}
    )


def test_T26_text_search_types_are_their_text(paths: BothPaths) -> None:
    paths.check(
        {
            "tsvector": [
                ("'fat:2A cat:1'", "'cat':1 'fat':2A"),
                ("to_tsvector('english', 'O''Reilly''s cats')", "'cat':4 'o':1 'reilli':2"),
                ("''", ""),
            ],
            "tsquery": [("'fat & !rat'", "'fat' & !'rat'"), ("''", "")],
        }
    )
    paths.database.execute(
        "CREATE TABLE searched (id int PRIMARY KEY, body text, words tsvector);"
        "CREATE TRIGGER w BEFORE INSERT OR UPDATE ON searched FOR EACH ROW EXECUTE FUNCTION"
        " tsvector_update_trigger(words, 'pg_catalog.simple', body)"
    )
    rows = paths.both("searched", ["'a b'"])
    assert rows[0]["words"] == "'a':1 'b':2"


def test_T27_enums_are_their_labels(paths: BothPaths) -> None:
    paths.database.execute("CREATE SCHEMA other")
    paths.database.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'so so', 'a,b\"c'); CREATE TYPE other.mood AS ENUM ('1')"
    )
    paths.database.execute("""CREATE TYPE "Quoted Mood" AS ENUM ('NULL', '')""")
    columns: Values = {
        "mood": [("'sad'", "sad"), ("'so so'", "so so"), ("""'a,b"c'""", 'a,b"c')],
        "other.mood": [("'1'", "1")],
        '"Quoted Mood"': [("'NULL'", "NULL"), ("''", "")],
    }
    paths.check(columns)
    paths.check_key(columns)


def test_T27_a_label_added_in_mid_stream_is_a_value_like_others(paths: BothPaths) -> None:
    paths.database.execute(
        "CREATE TYPE step AS ENUM ('a'); "
        "CREATE TABLE steps (id int PRIMARY KEY, s step DEFAULT 'a', l step[])"
    )
    paths.database.execute("INSERT INTO steps (id) VALUES (1)")
    assert [row["s"] for row in paths.live()["steps"].rows] == ["a"]
    paths.database.execute("ALTER TYPE step ADD VALUE 'b'")
    paths.database.execute("ALTER TYPE step RENAME TO stage; INSERT INTO steps VALUES (2, 'b', '{a,b}')")
    rows = paths.live()["steps"].rows
    assert [(row["s"], row["l"]) for row in rows] == [("b", ["a", "b"])]
    assert sorted(row["s"] for row in paths.snapshot("steps").rows) == ["a", "b"]


def test_T28_domains_are_their_base_type_with_its_modifier(paths: BothPaths) -> None:
    paths.database.execute(
        "CREATE DOMAIN price AS numeric(12,2) CHECK (VALUE >= 0); "
        "CREATE DOMAIN net_price AS price NOT NULL DEFAULT 0"
    )
    paths.database.execute(
        "CREATE DOMAIN tags AS text[]; CREATE DOMAIN code AS char(4); CREATE DOMAIN d_day AS date"
    )
    columns: Values = {
        "price": [("1.005", Decimal("1.01")), ("'NaN'", Exactly("NaN"))],
        "tags": [("'{a,NULL}'", ["a", None])],
        "code": [("'ab'", "ab  ")],
        "d_day": [("'2024-02-29'", date(2024, 2, 29)), ("'infinity'", Exactly("infinity"))],
        "information_schema.cardinal_number": [("7", 7)],
    }
    schema = paths.check(columns)
    assert [column.arrow_type for column in schema.columns[1:6]] == [
        pa.decimal128(12, 2),
        pa.list_(pa.string()),
        pa.string(),
        pa.date32(),
        pa.int32(),
    ]
    paths.check_key(columns)
    paths.database.execute("CREATE TABLE nets (id int PRIMARY KEY, n net_price, l net_price[])")
    rows = paths.both("nets", ["2, '{1.5}'"])
    assert (rows[0]["n"], rows[0]["l"]) == (Decimal("2.00"), [Decimal("1.50")])


def test_T28_a_column_altered_to_a_domain_is_read_as_before(paths: BothPaths) -> None:
    paths.database.execute(
        "CREATE DOMAIN small AS int CHECK (VALUE < 10); CREATE TABLE altered (id int PRIMARY KEY, v int)"
    )
    paths.database.execute("INSERT INTO altered VALUES (1, 1)")
    paths.database.execute("ALTER TABLE altered ALTER v TYPE small; INSERT INTO altered VALUES (2, 2)")
    batches = [batch for batch in paths.changes() if batch.table.name.name == "altered"]
    assert [row["v"] for batch in batches for row in batch.rows.to_pylist()] == [1, 2]
    assert {batch.table.columns[1].arrow_type for batch in batches} == {pa.int32()}
    assert batches[-1].table == paths.catalog("altered")[1]


def test_T28_a_dropped_type_is_read_by_the_name_in_its_message(paths: BothPaths) -> None:
    paths.database.execute(
        "CREATE DOMAIN short_lived AS int; CREATE TABLE gone (id int PRIMARY KEY, v short_lived)"
    )
    paths.database.execute("INSERT INTO gone VALUES (1, 5)")
    paths.database.execute("DROP TABLE gone; DROP DOMAIN short_lived")
    assert [row["v"] for row in paths.live()["gone"].rows] == [5]


def test_T29_composites_are_their_text(paths: BothPaths) -> None:
    paths.database.execute(
        "CREATE TYPE pair AS (a int, b text); CREATE TYPE nest AS (p pair, q pair[]); "
        "CREATE TABLE rowish (x int, y date)"
    )
    paths.check(
        {
            "pair": [("ROW(1, 'x')", "(1,x)"), ("ROW(NULL, '')", '(,"")'), ("ROW(NULL, NULL)", "(,)")],
            "nest": [
                ("""ROW(ROW(1, 'a"b'), ARRAY[ROW(2, 'c')::pair])""", r'("(1,""a""""b"")","{""(2,c)""}")')
            ],
            "rowish": [("ROW(1, '2024-01-31')", "(1,2024-01-31)")],
        }
    )


def test_T30_arrays_of_one_dimension_are_lists(paths: BothPaths) -> None:
    columns: Values = {
        "text[]": [
            ("'{}'", []),
            ("ARRAY['a', NULL, 'NULL', 'null', '']", ["a", None, "NULL", "null", ""]),
            (
                r"ARRAY['a,b', '{c}', 'd\"e', 'f\\g', E'h\ni', ' ', '🙂']",
                ["a,b", "{c}", 'd\\"e', "f\\\\g", "h\ni", " ", "🙂"],
            ),
            ("'[0:1]={a,b}'", Exactly("[0:1]={a,b}")),
            ("'[5:5]={NULL}'", Exactly("[5:5]={NULL}")),
        ],
        "int[]": [
            ("'{1,-2,NULL}'", [1, -2, None]),
            ("array_fill(7, ARRAY[10000])", [7] * 10_000),
            ("'[1:2]={1,2}'", [1, 2]),
        ],
        "numeric(5,1)[]": [("'{1.25,NULL}'", [Decimal("1.3"), None]), ("'{1,NaN}'", Exactly("{1.0,NaN}"))],
        "numeric[]": [("'{1,1e30}'", Exactly("{1,1000000000000000000000000000000}"))],
        "date[]": [("'{2024-02-29,infinity}'", Exactly("{2024-02-29,infinity}"))],
        "box[]": [("'{(1,1),(0,0);(2,2),(1,1)}'", ["(1,1),(0,0)", "(2,2),(1,1)"])],
        "bytea[]": [(r"ARRAY['\x00'::bytea, '', NULL]", [b"\0", b"", None])],
        "jsonb[]": [("""ARRAY['{"a": "b,c"}'::jsonb]""", ['{"a": "b,c"}'])],
        "char(3)[]": [("'{a}'", ["a  "])],
    }
    paths.check(columns, arrays=False)
    paths.check_key({name: columns[name] for name in ("text[]", "int[]", "numeric(5,1)[]")})


def test_T31_arrays_of_more_dimensions_are_their_text(paths: BothPaths) -> None:
    paths.check(
        {
            "int[]": [
                ("'{{1,2},{3,4}}'", Exactly("{{1,2},{3,4}}")),
                ("'{1}'", [1]),
                ("'{{{NULL}}}'", Exactly("{{{NULL}}}")),
            ],
            "text[][]": [
                ("""ARRAY[ARRAY['a,b', '}{'], ARRAY['"', NULL]]""", Exactly(r'{{"a,b","}{"},{"\"",NULL}}')),
                ("'{a}'", ["a"]),
            ],
            "int[2][2]": [("'[0:1][0:1]={{1,2},{3,4}}'", Exactly("[0:1][0:1]={{1,2},{3,4}}"))],
        },
        arrays=False,
    )
