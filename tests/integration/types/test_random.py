"""Random values of every type, made and rendered by Postgres: both roads must agree, and with psycopg, which reads them in its own way."""

from __future__ import annotations

import struct
import uuid
from datetime import UTC, datetime
from typing import Any

from penstock.postgres.connection import connect
from tests.integration.types.randoms import NUMBERS
from tests.integration.types.roads import Roads

ROWS = 150
_TEXT = "substr(E'ab{}\",\\\\ \\n''é漢🙂NULL', (random() * 12)::int, (random() * 5)::int)"
_DAY = "date '0001-01-01' + (random() * 3652058)::int"
_MOMENT = "timestamp '0001-01-01' + random() * interval '9998 years'"

NATIVE = {
    "bool": "random() < 0.5",
    **NUMBERS,
    "numeric(30,12)": "((random() - 0.5) * 1e15)::numeric(30,12)",
    "text": _TEXT,
    "varchar(40)": _TEXT,
    "char(6)": _TEXT,
    "bytea": "decode(substr(md5(random()::text), 1, 2 * (random() * 16)::int), 'hex')",
    "date": _DAY,
    "timestamp": _MOMENT,
    "timestamptz": f"({_MOMENT}) AT TIME ZONE 'UTC'",
    "uuid": "md5(random()::text)::uuid",
}
"""Types that psycopg turns into the same Python values as Arrow does."""

RENDERED = {
    "name": _TEXT,
    '"char"': 'chr(33 + (random() * 90)::int)::"char"',
    "bit(5)": "(random() * 31)::int::bit(5)",
    "varbit": "(random() * 31)::int::bit(5)::varbit",
    "time": f"({_MOMENT})::time",
    "timetz": f"(({_MOMENT})::time::text || '+05:30')::timetz",
    "interval": "make_interval((random() * 9 - 5)::int, (random() * 99)::int, 0, (random() * 9 - 5)::int, 0, 0, random() * 1e6 - 5e5)",
    "json": f"to_json({_TEXT})",
    "jsonb": f"jsonb_build_object({_TEXT}, random(), 'b', ARRAY[NULL, {_TEXT}])",
    "inet": "('10.0.0.0'::inet + (random() * 16777215)::int)",
    "point": "point(random(), -random())",
    "box": "box(point(random(), random()), point(-random(), random()))",
    "int4range": "int4range((random() * 9)::int, 9 + (random() * 9)::int)",
    "tstzrange": "tstzrange(now() - random() * interval '1 year', NULL)",
    "nummultirange": "nummultirange(numrange(0, random()::numeric), numrange(2, NULL))",
    "tsvector": "array_to_tsvector(ARRAY[md5(random()::text), 'a b'])",
    "pg_lsn": "('0/0'::pg_lsn + (random() * 1e15)::numeric::int8)",
    "random_pair": f"ROW((random() * 9)::int, {_TEXT})::random_pair",
    "random_colour": "(ARRAY['red', 'dark blue', 'a,\"b'])[1 + (random() * 2)::int]::random_colour",
}
"""Types that stay as Postgres writes them."""


def test_random_values_of_every_type_are_the_same_by_both_roads_and_right(roads: Roads) -> None:
    roads.database.execute("CREATE TYPE random_pair AS (a int, b text); CREATE TYPE random_colour AS ENUM ('red', 'dark blue', 'a,\"b')")
    types = NATIVE | RENDERED
    columns = ", ".join(f"c{at} {name}, a{at} {name}[]" for at, name in enumerate(types))
    roads.database.execute(f"CREATE TABLE random_values (id int PRIMARY KEY, {columns})")
    values = ", ".join(f"{_sometimes(value)}, {_array(name, value)}" for name, value in types.items())
    roads.database.execute(f"INSERT INTO random_values SELECT n, {values} FROM generate_series(1, {ROWS}) n")
    by_snapshot = sorted(roads.snapshot("random_values").rows, key=lambda row: row["id"])
    by_stream = sorted(roads.live()["random_values"].rows, key=lambda row: row["id"])
    assert len(by_snapshot) == len(by_stream) == ROWS
    names = [f"{kind}{at}" for at in range(len(types)) for kind in "ca"]
    for here, there in zip(by_snapshot, by_stream, strict=True):
        assert {name: repr(here[name]) for name in names} == {name: repr(there[name]) for name in names}
        assert here["_exact"] is there["_exact"] is None
    _compare_with_psycopg(roads, by_snapshot, list(types))


def _sometimes(value: str) -> str:
    return f"CASE WHEN random() < 0.95 THEN {value} END"


def _array(name: str, value: str) -> str:
    """Of none to three elements; random() would be the same for all if it were not asked again for each."""
    full = ", ".join(_sometimes(value) for _ in range(3))
    return f"(ARRAY[{full}]::{name}[])[1:(random() * 3)::int]"


def _compare_with_psycopg(roads: Roads, found: list[dict[str, Any]], types: list[str]) -> None:
    selected = [_selected(at, kind) for at in range(len(types)) for kind in "ca"]
    with connect(roads.address) as connection:
        statement: Any = f"SELECT {', '.join(selected)} FROM public.random_values ORDER BY id"
        expected: list[Any] = connection.execute(statement).fetchall()
    names = [f"{kind}{at}" for at in range(len(types)) for kind in "ca"]
    for row, wanted in zip(found, expected, strict=True):
        for name, value in zip(names, wanted, strict=True):
            type_name = types[int(name[1:])]
            assert repr(row[name]) == repr(_python(value, type_name)), (type_name, name)


def _selected(at: int, kind: str) -> str:
    """Native types as they are, others as their output function writes them; element by element in arrays."""
    column = f"{kind}{at}"
    if at < len(NATIVE):
        return column
    if kind == "c":
        return f"CASE WHEN {column} IS DISTINCT FROM NULL THEN format('%s', {column}) END"
    each = f"SELECT CASE WHEN {column}[n] IS DISTINCT FROM NULL THEN format('%s', {column}[n]) END"
    return f"CASE WHEN {column} IS NOT NULL THEN ARRAY({each} FROM generate_subscripts({column}, 1) n ORDER BY n) END"


def _python(value: Any, type_name: str) -> Any:
    if isinstance(value, list):
        return [_python(each, type_name) for each in value]
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    if value is not None and type_name == "float4":
        return struct.unpack("f", struct.pack("f", value))[0]
    return str(value) if isinstance(value, uuid.UUID) else value
