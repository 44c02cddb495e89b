"""Postgres is the oracle: it renders random values, the decoder reads the text, and psycopg returns the
value.
"""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest

from penstock.change import LogStep, Transactions
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from tests.support.fix_postgres import Database
from tests.support.typed_text import decode_text
from tests.support.types.randoms import NUMBERS, rendered

SETTINGS = """
SET timezone = 'UTC'; SET datestyle = 'ISO'; SET intervalstyle = 'iso_8601'; SET lc_monetary = 'C';
SET bytea_output = 'hex'; SET extra_float_digits = 1
"""

RANDOM_VALUES = {
    "boolean": "random() < 0.5",
    **NUMBERS,
    "numeric(38,0)": "(random() * 1e18)::numeric(38,0) * (random() * 1e18)::numeric(38,0)",
    "numeric": "round(((random() - 0.5) * 1e15)::numeric, (random() * 18)::int)",
    "text": "CASE WHEN random() < 0.5 THEN chr((random() * 50000)::int + 1) || E'\\n' ELSE "
    "md5(random()::text) END",
    "varchar(40)": "md5(random()::text)",
    "bytea": "decode(substr(md5(random()::text), 1, 2 * (random() * 16)::int), 'hex')",
    "date": "date '0001-01-01' + (random() * 3652058)::int",
    "timestamp": "timestamp '0001-01-01' + random() * interval '9998 years'",
    "timestamptz": "timestamptz '0001-01-01 00:00:00+00' + random() * interval '9998 years'",
    "uuid": "md5(random()::text)::uuid",
    "money": "((random() - 0.5) * 1e12)::numeric::money",
    **rendered(18),
}

LIMITS = {
    "int2": ["-32768", "32767"],
    "int4": ["-2147483648", "2147483647"],
    "int8": ["-9223372036854775808", "9223372036854775807"],
    "oid": ["4294967295"],
    "float4": ["NaN", "Infinity", "-Infinity", "1e-45", "3.4028235e38", "-0"],
    "float8": ["NaN", "Infinity", "-Infinity", "5e-324", "1.7976931348623157e308", "-0"],
    "numeric(12,2)": ["9999999999.99", "-0.01", "NaN"],
    "numeric": ["NaN", "1e-18", "1e19", "1e20", "1e-19", "-0.000", "1." + "0" * 50],
    "text": ["", "é漢🙂", "'\"\\"],
    "bytea": ["\\x", "\\x00ff"],
    "date": ["0001-01-01", "9999-12-31", "infinity", "-infinity", "0044-03-15 BC", "5874897-12-31"],
    "timestamp": [
        "infinity",
        "-infinity",
        "4713-01-01 00:00:00 BC",
        "294276-12-31 23:59:59.999999",
        "9999-12-31 23:59:59.999999",
    ],
    "money": ["92233720368547758.07", "-92233720368547758.08"],
    "interval": ["infinity", "-infinity"],
    "timestamptz": [
        "infinity",
        "-infinity",
        "4713-01-01 00:00:00+00 BC",
        "294276-12-31 23:59:59.999999+00",
        "0001-01-01 00:00:00+00",
    ],
}


@pytest.fixture
def settled(database: Database) -> Database:
    database.execute(SETTINGS)
    return database


@pytest.mark.parametrize("type_name", RANDOM_VALUES)
def test_values_that_postgres_renders_are_read_exactly_or_marked(settled: Database, type_name: str) -> None:
    settled.execute(f"CREATE TABLE v (at serial, x {type_name})")
    settled.execute(f"INSERT INTO v (x) SELECT {RANDOM_VALUES[type_name]} FROM generate_series(1, 500)")
    for text in [*LIMITS.get(type_name, []), None]:
        settled.execute("INSERT INTO v (x) VALUES (%s)", text)
    oid, modifier = settled.query(
        "SELECT atttypid::int8, atttypmod FROM pg_attribute WHERE attrelid = 'v'::regclass AND attname = 'x'"
    )[0]
    texts = [row[0] for row in settled.query(f"SELECT {_written('x')} FROM v ORDER BY at")]
    decoded = decode_text(pa.array(texts, pa.string()), oid, modifier)
    marks = decoded.inexact.to_pylist() if decoded.inexact is not None else [False] * len(texts)
    values = decoded.values.to_pylist()
    assert [value is None for value in values] == [
        mark or text is None for mark, text in zip(marks, texts, strict=True)
    ]
    # Back to Postgres: the decoded value, cast to the type, equals the stored one.
    held = {
        at: _for_postgres(value)
        for at, (value, mark) in enumerate(zip(values, marks, strict=True), 1)
        if not (value is None or mark)
    }
    read = (
        "unnest(%s::int[], %s::text[]) AS held (at, text) JOIN v USING (at) WHERE x IS DISTINCT FROM "
        f"text::{type_name}"
    )
    assert settled.query(f"SELECT at FROM {read}", list(held), list(held.values())) == []
    assert sum(marks) == _unholdable(settled, type_name)


def _written(column: str) -> str:
    """By the output function of its type, as a stream has it; a cast to text may write more, as that of inet
    does.
    """
    return f'CASE WHEN "{column}" IS NOT NULL THEN format(\'%s\', "{column}") END'


def _for_postgres(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value).replace("inf", "Infinity")
    return f"\\x{value.hex()}" if isinstance(value, bytes) else str(value)


def _unholdable(database: Database, type_name: str) -> int:
    conditions = {
        "date": "x > '9999-12-31' OR x < '0001-01-01'",
        "timestamp": "x >= '10000-01-01' OR x < '0001-01-01'",
        "timestamptz": "x >= '10000-01-01 00:00:00+00' OR x < '0001-01-01 00:00:00+00'",
        "numeric": "x = 'NaN' OR abs(x) >= 1e20 OR x <> round(x, 18)",
        "numeric(12,2)": "x = 'NaN'",
    }
    return int(database.query(f"SELECT count(*) FROM v WHERE {conditions.get(type_name, 'false')}")[0][0])


def test_the_stream_of_a_real_server_decodes_to_the_rows_of_its_table(settled: Database) -> None:
    columns = ", ".join(f'"{name}" {name}' for name in RANDOM_VALUES)
    settled.execute(f"CREATE TABLE source (id serial PRIMARY KEY, {columns}, big text)")
    settled.execute("ALTER TABLE source ALTER big SET STORAGE EXTERNAL")
    settled.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    slot = f"{settled.name}_types"
    settled.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
    values = ", ".join(RANDOM_VALUES.values())
    settled.execute(
        f"INSERT INTO source SELECT i, {values}, repeat('x', 3000 * (i % 2)) FROM generate_series(1, 200) i"
    )
    settled.execute("UPDATE source SET int4 = -1 WHERE id % 5 = 0")
    settled.execute("UPDATE source SET id = id + 1000 WHERE id % 7 = 0")
    settled.execute("DELETE FROM source WHERE id % 11 = 0")

    steps = PgOutputDecoder().decode(_messages(settled, slot))
    mirrored = _mirror(steps)
    names = ["id", *RANDOM_VALUES, "big"]
    texts = settled.query(
        "SELECT " + ", ".join(_written(name) for name in names) + " FROM source ORDER BY source.id"
    )
    types = {
        name: (oid, modifier)
        for name, oid, modifier in settled.query(
            "SELECT attname, atttypid::int8, atttypmod FROM pg_attribute "
            "WHERE attrelid = 'source'::regclass AND attnum > 0"
        )
    }
    expected = [
        decode_text(pa.array([row[at] for row in texts]), *types[name]).values.to_pylist()
        for at, name in enumerate(names)
    ]
    assert [[row[name] for name in names] for _, row in sorted(mirrored.items())] == [
        list(row) for row in zip(*expected, strict=True)
    ]


def _messages(database: Database, slot: str) -> list[bytes]:
    payloads = database.query(
        "SELECT lsn - '0/0'::pg_lsn, data FROM pg_logical_slot_get_binary_changes("
        "%s, NULL, NULL, 'proto_version', '1', 'publication_names', 'everything')",
        slot,
    )
    return [b"w" + int(lsn).to_bytes(8, "big") + b"\0" * 16 + data for lsn, data in payloads]


def _mirror(steps: list[LogStep]) -> dict[int, dict[str, Any]]:
    """The rows of the table after the steps, by key."""
    rows: dict[int, dict[str, Any]] = {}
    moved_from: dict[str, Any] = {}
    for step in steps:
        assert isinstance(step, Transactions)
        for change in (row for batch in step.batches for row in batch.rows.to_pylist()):
            if change["_change_type"] == "delete":
                moved_from = rows.pop(change["id"])
                continue
            before = rows.get(change["id"], moved_from)
            rows[change["id"]] = {**change, **{name: before[name] for name in change["_unchanged"] or []}}
    return rows
