"""Every family of types, from Postgres through snapshot and stream into Delta."""

from __future__ import annotations

import struct
from datetime import date, datetime
from decimal import Decimal

from penstock.errors import UnrepresentableError
from tests.support.fix_pipeline import MirrorFactory
from tests.support.fix_postgres import Database

_POINT = struct.pack("<dd", 2.5, -1).hex().upper()

_TYPES = """
CREATE EXTENSION vector;
CREATE TYPE colour AS ENUM ('red', 'dark blue');
CREATE TYPE pair AS (a int, b text);
CREATE DOMAIN price AS numeric(12,2);
"""
_LIKE_TEXT = """
CREATE TYPE {0};
CREATE FUNCTION {0}_in(cstring) RETURNS {0} LANGUAGE internal IMMUTABLE STRICT AS 'textin';
CREATE FUNCTION {0}_out({0}) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'textout';
CREATE TYPE {0} (INPUT = {0}_in, OUTPUT = {0}_out, STORAGE = extended, DELIMITER = ':');
"""
_COLUMNS = {
    "b": ("bool", "true"),
    "i": ("oid", "4294967295"),
    "f": ("real", "'NaN'"),
    "n": ("numeric(3,5)", "0.00123"),
    "u": ("numeric", "'NaN'"),
    "m": ("money", "'-$1,234.56'"),
    "p": ("price", "1.005"),
    "c": ("char(4)", "'ab'"),
    "y": ("bytea", r"'\x00ff'"),
    "d": ("date", "'1500-02-28'"),
    "ts": ("timestamp", "'0001-01-01 00:00:00.000001'"),
    "tz": ("timestamptz", "'1582-10-04 00:00:00+00'"),
    "t": ("time", "'24:00'"),
    "iv": ("interval", "'1 mon -1 day'"),
    "j": ("jsonb", """'{"a": 1}'"""),
    "r": ("int4range", "'[1,2)'"),
    "g": ("point", "'(1,2)'"),
    "e": ("colour", "'dark blue'"),
    "k": ("pair", "'(1,x)'"),
    "ia": ("int[]", "'{1,NULL,3}'"),
    "ta": ("text[]", """'{"a,b",NULL,""}'"""),
    "na": ("numeric(5,1)[]", "'{1.25}'"),
    "da": ("date[]", "'{1500-02-28}'"),
    "za": ("timestamptz[]", "'{2024-01-01 00:00:00+00}'"),
    "md": ("int[]", "'{{1,2},{3,4}}'"),
    "h": ("hstore", """'"a"=>"1", "b"=>NULL'"""),
    "ha": ("hstore[]", """ARRAY['"a"=>"1"'::hstore, NULL, '']"""),
    "v": ("vector(2)", "'[1,2.5]'"),
    "sv": ("sparsevec", "'{1:1.5}/3'"),
    "s": ("geometry", f"'0101000020E6100000{_POINT}'"),
    "sa": ("geometry[]", f"'{{0101000000{_POINT}:NULL}}'"),
}


def test_every_type_reaches_the_target_by_both_roads(database: Database, mirror: MirrorFactory) -> None:
    database.execute(_TYPES)
    for name in ("hstore", "geometry"):
        database.execute(_LIKE_TEXT.format(name))
    declared = ", ".join(f"{name} {type_name}" for name, (type_name, _) in _COLUMNS.items())
    database.execute(f"CREATE TABLE every (id int PRIMARY KEY, big hstore, {declared})")
    database.execute(
        "ALTER TABLE every ALTER big SET STORAGE EXTERNAL; CREATE TABLE by_list (k int[] PRIMARY KEY, v int)"
    )
    values = ", ".join(value for _, value in _COLUMNS.values())
    big = "('\"big\"=>\"' || repeat('x', 5000) || '\"')::hstore"
    database.execute(
        f"INSERT INTO every SELECT n, {big}, {values} FROM generate_series(1, 3) n; "
        "INSERT INTO every (id) VALUES (4)"
    )
    database.execute("INSERT INTO by_list VALUES ('{1,2}', 1), ('{{1},{2}}', 1), ('{}', 1), ('[0:0]={1}', 1)")
    types = mirror()
    types.run_once()
    database.execute(
        f"INSERT INTO every SELECT n, {big}, {values} FROM generate_series(5, 7) n; "
        "INSERT INTO every (id) VALUES (8)"
    )
    database.execute(
        'UPDATE every SET i = 7, h = \'"c"=>"d"\' WHERE id IN (1, 5); DELETE FROM every WHERE id IN (2, 6)'
    )
    database.execute(
        "UPDATE by_list SET v = 2; DELETE FROM by_list WHERE k IN ('{1,2}', '{{1},{2}}'); "
        "INSERT INTO by_list VALUES ('{NULL}', 3)"
    )
    types.run_once()
    types.assert_equal("public.every", "public.by_list")

    rows = {row["id"]: row.asDict(recursive=True) for row in types.rows("public.every")}
    by_snapshot, by_stream = rows[3], rows[7]
    assert repr({**by_snapshot, "id": 0}) == repr({**by_stream, "id": 0})
    assert by_stream["_exact"] == {"u": "NaN", "md": "{{1,2},{3,4}}"}
    assert by_stream["h"] == {"a": "1", "b": None}
    assert by_stream["s"] == {"srid": 4326, "wkb": bytearray.fromhex("0101000000" + _POINT)}
    assert (by_stream["d"], by_stream["da"]) == (date(1500, 2, 28), [date(1500, 2, 28)])
    assert by_stream["ts"] == datetime(1, 1, 1, 0, 0, 0, 1)  # noqa: DTZ001
    assert (by_stream["p"], by_stream["na"]) == (Decimal("1.01"), [Decimal("1.3")])
    assert rows[1]["big"] == rows[5]["big"] == {"big": "x" * 5000}
    assert {str(row["k"] or row["_exact"]): row["v"] for row in types.rows("public.by_list")} == {
        "None": 2,
        "{'k': '[0:0]={1}'}": 2,
        "[None]": 3,
    }


def test_C08_a_value_beyond_its_type_stops_only_its_table_with_policy_error(
    database: Database, mirror: MirrorFactory
) -> None:
    for name in ("copied", "streamed"):
        database.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, d date, n numeric); "
            f"INSERT INTO {name} VALUES (1, '2024-01-01', 'NaN')"
        )
    database.execute("INSERT INTO copied VALUES (2, 'infinity', 1)")
    strict = mirror(types={"on_unrepresentable": "error", "numeric": "string"})
    assert set(strict.run_once().failed) == {"public.copied"}
    database.execute("INSERT INTO streamed VALUES (2, '0044-03-15 BC', 2)")
    failed = strict.run_once().failed
    assert {name: (status.reason or "").partition(",")[0] for name, status in failed.items()} == {
        f"public.{name}": f"{UnrepresentableError.code}: column 'd' of public.{name} holds a value that "
        "its type cannot hold"
        for name in ("copied", "streamed")
    }
    assert [(row["id"], row["n"]) for row in strict.rows("public.streamed")] == [(1, "NaN")]
