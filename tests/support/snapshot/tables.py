"""Tables for snapshots, and changes made to them during a snapshot."""

from __future__ import annotations

from penstock.schema import TableName
from tests.support.snapshot.copying import Copying

WIDE = "repeat(md5(g::text), 20)"  # some ten rows to a block


def make(copying: Copying, table: str, rows: int = 120) -> TableName:
    copying.captured.execute(
        f"CREATE TABLE {table} (id int PRIMARY KEY, v text)",
        f"INSERT INTO {table} SELECT g, {WIDE} FROM generate_series(1, {rows}) g",
    )
    copying.captured.start()
    return TableName("public", table)


def change(copying: Copying, table: str) -> None:
    """Every kind of change, all over the table."""
    copying.captured.execute(
        f"UPDATE {table} SET v = 'changed' WHERE id % 7 = 0",
        f"DELETE FROM {table} WHERE id % 11 = 0",
        f"UPDATE {table} SET id = id + 1000 WHERE id % 13 = 0 AND id < 1000",
        f"INSERT INTO {table} SELECT g, {WIDE} FROM generate_series(5000, 5050) g ON CONFLICT DO NOTHING",
    )


# Type of the key, values as SQL, and the texts to look up. The last value exists but is not looked up.
KEYS: dict[str, tuple[str, list[str], list[str]]] = {
    "number": ("numeric", ["1.00", "-0.5", "1e-9", "12345678901234567890.5"], ["1", "-0.5", "1E-9"]),
    "beyond": ("numeric", ["'NaN'", "'Infinity'", "1"], ["NaN", "Infinity"]),
    "words": ("text", [r"E'back\\slash'", "'quo\"te, {brace}'", "'it''s'", "''", "' '", "'ünï 🚰'", "'x'"],
              ["back\\slash", 'quo"te, {brace}', "it's", "", " ", "ünï 🚰"]),
    "short": ("varchar(5)", ["'a'", "'b'"], ["a"]),
    "padded": ("char(6)", ["'ab'", "'abc'"], ["ab    "]),
    "flag": ("bool", ["true", "false"], ["true"]),
    "id": ("uuid", ["'0a000000-0000-0000-0000-000000000000'", "gen_random_uuid()"],
           ["0a000000-0000-0000-0000-000000000000"]),
    "moment": ("timestamptz", ["'2024-02-29 23:59:59.123456+13'", "'infinity'",
                               "'0044-03-15 12:00:00+00 BC'", "now()"],
               ["2024-02-29 10:59:59.123456", "infinity", "0044-03-15 12:00:00+00 BC"]),
    "day": ("date", ["'0001-01-01'", "'2024-01-01'"], ["0001-01-01"]),
    "raw": ("bytea", [r"'\x00ff27'", r"'\x'", r"'\x01'"], [r"\x00ff27", r"\x"]),
    "feeling": ("mood", ["'so so'", "'fine'"], ["so so"]),
    "real": ("float8", ["0.1", "'NaN'", "'-Infinity'", "3"], ["0.1", "NaN", "-Infinity"]),
    "small": ("float4", ["0.1", "3"], ["0.1"]),
    "address": ("inet", ["'10.0.0.1'", "'10.0.0.0/8'"], ["10.0.0.1"]),
    "span": ("interval", ["'1 day'", "'2 days'"], ["P1D"]),
    "couple": ("pair", ["ROW(1, 'x y')::pair", "ROW(2, NULL)::pair"], ['(1,"x y")']),
    "domain": ("code", ["'AB'", "'CD'"], ["AB"]),
    "price": ("money", ["12.5", "13"], ["12.50"]),
}  # fmt: skip
