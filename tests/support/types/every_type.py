"""A table with a column of every family of types."""

from __future__ import annotations

import struct

from tests.support.fix_postgres import Database

POINT = struct.pack("<dd", 2.5, -1).hex().upper()

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
    "s": ("geometry", f"'0101000020E6100000{POINT}'"),
    "sa": ("geometry[]", f"'{{0101000000{POINT}:NULL}}'"),
}
_BIG = "('\"big\"=>\"' || repeat('x', 5000) || '\"')::hstore"


def create_every(database: Database) -> None:
    """Create the table `every`, with the key `id`, without rows."""
    database.execute(_TYPES)
    for name in ("hstore", "geometry"):
        database.execute(_LIKE_TEXT.format(name))
    declared = ", ".join(f"{name} {type_name}" for name, (type_name, _) in _COLUMNS.items())
    database.execute(f"CREATE TABLE every (id int PRIMARY KEY, big hstore, {declared})")
    database.execute("ALTER TABLE every ALTER big SET STORAGE EXTERNAL")


def insert_every(database: Database, first: int) -> None:
    """Insert three rows of values from the key `first` on, and a row of nulls."""
    values = ", ".join(value for _, value in _COLUMNS.values())
    database.execute(
        f"INSERT INTO every SELECT n, {_BIG}, {values} FROM generate_series({first}, {first} + 2) n; "
        f"INSERT INTO every (id) VALUES ({first} + 3)"
    )
