"""Random values of every type, rendered by Postgres: snapshot, stream and psycopg's own reading agree."""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from penstock.postgres.connection import connect
from tests.support.types.both_paths import BothPaths
from tests.support.types.randoms import MOMENT, NUMBERS, TEXT, UNORDERED, rendered

ROWS = 150
KEYS = 40
_DAY = "date '0001-01-01' + (random() * 3652058)::int"

NATIVE = {
    "bool": "random() < 0.5",
    **NUMBERS,
    "numeric(30,12)": "((random() - 0.5) * 1e15)::numeric(30,12)",
    "text": TEXT,
    "varchar(40)": TEXT,
    "char(6)": TEXT,
    "bytea": "decode(substr(md5(random()::text), 1, 2 * (random() * 16)::int), 'hex')",
    "date": _DAY,
    "timestamp": MOMENT,
    "timestamptz": f"({MOMENT}) AT TIME ZONE 'UTC'",
    "uuid": "md5(random()::text)::uuid",
}
"""Types that psycopg turns into the same Python values as Arrow does."""

_OTHERS = {
    '"char"': 'chr(33 + (random() * 90)::int)::"char"',
    "random_pair": f"ROW((random() * 9)::int, {TEXT})::random_pair",
    "random_colour": "(ARRAY['red', 'dark blue', 'a,\"b'])[1 + (random() * 2)::int]::random_colour",
    "random_note": TEXT,
}
_MADE = """
CREATE TYPE random_pair AS (a int, b text);
CREATE TYPE random_colour AS ENUM ('red', 'dark blue', 'a,"b');
CREATE DOMAIN random_short AS varchar(40);
CREATE DOMAIN random_note AS random_short CHECK (VALUE <> 'never');
CREATE DOMAIN random_count AS int8 CHECK (VALUE > -1)
"""
_FLOATS = "(random() * 100 - 50)::real, (random() - 0.5)::real, 0"


def _floats(text: str) -> list[float]:
    return [struct.unpack("f", struct.pack("f", float(each)))[0] for each in text.strip("[]").split(",")]


def _sparse(text: str) -> dict[str, Any]:
    entries, _, dimensions = text.partition("/")
    pairs = [each.split(":") for each in entries.strip("{}").split(",") if each]
    values = [struct.unpack("f", struct.pack("f", float(value)))[0] for _, value in pairs]
    return {"dimensions": int(dimensions), "indices": [int(index) for index, _ in pairs], "values": values}


@dataclass(frozen=True)
class Read:
    """A type that neither psycopg nor Arrow returns as text: how values are created, queried and compared."""

    value: str
    asked: str
    understood: Callable[[str], Any]
    extension: str | None = None


READ = {
    "money": Read("((random() - 0.5) * 1e12)::numeric::money", "({}::numeric)::text", Decimal),
    "random_count": Read("(random() * 1e15)::int8", "{}::text", int),
    "hstore": Read(
        f"hstore(ARRAY['a', {TEXT}], ARRAY[{TEXT}, NULL])",
        "public.hstore_to_json({})::text",
        json.loads,
        "hstore",
    ),
    "vector": Read(f"ARRAY[{_FLOATS}]::vector", "{}::text", _floats, "vector"),
    "vector(3)": Read(f"ARRAY[{_FLOATS}]::vector", "{}::text", _floats, "vector"),
    "halfvec": Read(f"ARRAY[{_FLOATS}]::real[]::halfvec", "{}::text", _floats, "vector"),
    "sparsevec": Read(f"ARRAY[{_FLOATS}]::vector::sparsevec", "{}::text", _sparse, "vector"),
}


EXTENSIONS = {17: "hstore", 18: "vector"}
"""Every test server has one of them."""
_WITH_XML = 17
"""The other server is built without it."""


@pytest.fixture
def values(paths: BothPaths, postgres_version: int) -> dict[str, str]:
    """An expression for each type that the database has."""
    extension = EXTENSIONS[postgres_version]
    if not paths.database.query("SELECT 1 FROM pg_type WHERE typname = 'random_pair'"):
        paths.database.execute(f"CREATE EXTENSION IF NOT EXISTS {extension}; {_MADE}")
    read = {name: each.value for name, each in READ.items() if each.extension in (None, extension)}
    known = NATIVE | rendered(postgres_version) | UNORDERED | _OTHERS | read
    return {name: value for name, value in known.items() if name != "xml" or postgres_version == _WITH_XML}


@pytest.mark.versions(17, 18)
def test_random_values_of_every_type_are_the_same_by_both_roads_and_right(
    paths: BothPaths, values: dict[str, str]
) -> None:
    columns = ", ".join(f"c{at} {name}, a{at} {name}[]" for at, name in enumerate(values))
    paths.database.execute(f"CREATE TABLE random_values (id int PRIMARY KEY, {columns})")
    made = ", ".join(f"{_sometimes(value)}, {_array(name, value)}" for name, value in values.items())
    paths.database.execute(f"INSERT INTO random_values SELECT n, {made} FROM generate_series(1, {ROWS}) n")
    by_snapshot = sorted(paths.snapshot("random_values").rows, key=lambda row: row["id"])
    by_stream = sorted(paths.live()["random_values"].rows, key=lambda row: row["id"])
    assert len(by_snapshot) == len(by_stream) == ROWS
    names = [f"{kind}{at}" for at in range(len(values)) for kind in "ca"]
    for here, there in zip(by_snapshot, by_stream, strict=True):
        assert {name: repr(here[name]) for name in names} == {name: repr(there[name]) for name in names}
        assert here["_exact"] is there["_exact"] is None
    types = [type_name for type_name in values for _ in "ca"]
    asked = ", ".join(_asked(name, type_name) for name, type_name in zip(names, types, strict=True))
    expected = _ask(paths, f"SELECT {asked} FROM public.random_values ORDER BY id")
    for row, wanted in zip(by_snapshot, expected, strict=True):
        for name, type_name, value in zip(names, types, wanted, strict=True):
            assert repr(row[name]) == repr(_python(value, type_name)), (type_name, name)


@pytest.mark.versions(17, 18)
def test_random_values_of_every_type_that_may_be_a_key_find_their_row_by_both_roads(
    paths: BothPaths, values: dict[str, str]
) -> None:
    keys = {name: value for name, value in values.items() if name not in UNORDERED and name != "hstore"}
    expected = {}
    for at, (type_name, value) in enumerate(keys.items()):
        table = f"random_key_{at}"
        paths.database.execute(f"CREATE TABLE {table} (x {type_name} PRIMARY KEY, v int)")
        paths.database.execute(
            f"INSERT INTO {table} SELECT {value}, 0 FROM generate_series(1, {KEYS}) ON CONFLICT DO NOTHING"
        )
        rows = _ask(paths, f"SELECT {_asked('x', type_name)} FROM public.{table}")
        expected[table] = [(_python(row[0], type_name), None) for row in rows]
    assert all(expected.values())
    paths.check_keys(expected)


def _sometimes(value: str) -> str:
    return f"CASE WHEN random() < 0.95 THEN {value} END"


def _array(name: str, value: str) -> str:
    """Zero to three elements; random() needs a reference to the outer row, or it is evaluated once for
    all.
    """
    full = ", ".join(_sometimes(value) for _ in range(3))
    return f"(ARRAY[{full}]::{name}[])[1:(random() * 3)::int]"


def _ask(paths: BothPaths, statement: Any) -> list[Any]:
    with connect(paths.address) as connection:
        return connection.execute(statement).fetchall()


def _asked(column: str, type_name: str) -> str:
    """Native types unchanged, others in the text of their output function; in arrays element by element."""
    if type_name in NATIVE:
        return column
    text = READ[type_name].asked if type_name in READ else "format('%s', {})"
    if not column.startswith("a"):
        return f"CASE WHEN {column} IS DISTINCT FROM NULL THEN {text.format(column)} END"
    each = f"SELECT CASE WHEN {column}[n] IS DISTINCT FROM NULL THEN {text.format(f'{column}[n]')} END"
    return (
        f"CASE WHEN {column} IS NOT NULL THEN ARRAY({each} FROM generate_subscripts({column}, 1) n "
        "ORDER BY n) END"
    )


def _python(value: Any, type_name: str) -> Any:
    if isinstance(value, list):
        return [_python(each, type_name) for each in value]
    if value is not None and type_name in READ:
        return READ[type_name].understood(value)
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    if value is not None and type_name == "float4":
        return struct.unpack("f", struct.pack("f", value))[0]
    return str(value) if isinstance(value, uuid.UUID) else value
