"""T01–T20, T32: scalar types. Each pair is (SQL, expected value in snapshot and stream)."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from penstock.postgres.connection import connect, connect_replication
from tests.support.types.both_paths import BothPaths, Exactly

UUID = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"


def same(*texts: str) -> list[tuple[str, Any]]:
    """Values that stay as they are written."""
    return [("'" + text.replace("'", "''") + "'", text) for text in texts]


def test_T01_integers_and_booleans_are_exact(paths: BothPaths) -> None:
    columns: dict[str, list[tuple[str, Any]]] = {
        "boolean": [("true", True), ("false", False)],
        "smallint": [("-32768", -32768), ("32767", 32767), ("0", 0)],
        "int": [("-2147483648", -(2**31)), ("2147483647", 2**31 - 1)],
        "bigint": [("-9223372036854775808", -(2**63)), ("9223372036854775807", 2**63 - 1)],
        "oid": [("4294967295", 4294967295), ("0", 0)],
    }
    schema = paths.check(columns)
    assert [column.arrow_type for column in schema.columns[1:6]] == [
        pa.bool_(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.int64(),
    ]
    paths.check_key(columns)


def test_T01_serial_columns_are_their_integers(paths: BothPaths) -> None:
    paths.database.execute("CREATE TABLE serials (id serial PRIMARY KEY, a smallserial, b bigserial)")
    assert [column.arrow_type for column in paths.catalog("serials")[1].columns] == [
        pa.int32(),
        pa.int16(),
        pa.int64(),
    ]


def test_T02_floats_keep_nan_infinity_and_every_bit(paths: BothPaths) -> None:
    special: list[tuple[str, Any]] = [
        ("'NaN'", math.nan),
        ("'Infinity'", math.inf),
        ("'-Infinity'", -math.inf),
        ("'-0'", -0.0),
    ]
    columns: dict[str, list[tuple[str, Any]]] = {
        "real": [
            *special,
            ("1e-45", 1.401298464324817e-45),
            ("3.4028235e38", 3.4028234663852886e38),
            ("0.1", 0.10000000149011612),
        ],
        "double precision": [*special, ("5e-324", 5e-324), ("1e300", 1e300), ("0.1", 0.1), ("pi()", math.pi)],
    }
    paths.check(columns)
    paths.check_key(
        {name: [value for value in values if value[0] != "'-0'"] for name, values in columns.items()}
    )


def test_T03_a_declared_numeric_is_that_decimal(paths: BothPaths) -> None:
    columns: dict[str, list[tuple[str, Any]]] = {
        "numeric(10,2)": [
            ("0", Decimal("0.00")),
            ("-99999999.99", Decimal("-99999999.99")),
            ("1.005", Decimal("1.01")),
        ],
        "numeric(38,0)": [("9" * 38, Decimal("9" * 38)), ("-" + "9" * 38, Decimal("-" + "9" * 38))],
        "numeric(38,38)": [("0." + "9" * 38, Decimal("0." + "9" * 38)), ("1e-38", Decimal("1E-38"))],
        "numeric(1)": [("9", Decimal(9))],
    }
    schema = paths.check(columns)
    assert [column.arrow_type for column in schema.columns[1:5]] == [
        pa.decimal128(*each) for each in ((10, 2), (38, 0), (38, 38), (1, 0))
    ]
    paths.check_key(columns)


def test_T04_an_unbounded_numeric_is_exact_or_its_text(paths: BothPaths) -> None:
    long, small = "9" * 500 + "." + "9" * 500, "0." + "0" * 18 + "1"
    columns: dict[str, list[tuple[str, Any]]] = {
        "numeric": [
            ("1", Decimal("1.000000000000000000")),
            ("-0.000000000000000001", Decimal("-1E-18")),
            ("1.50", Decimal("1.500000000000000000")),
            (long, Exactly(long)),
            (small, Exactly(small)),
            ("1e20", Exactly("1" + "0" * 20)),
        ],
        "numeric(50,10)": [
            ("1e30", Exactly("1" + "0" * 30 + "." + "0" * 10)),
            ("0.5", Decimal("0.500000000000000000")),
        ],
    }
    schema = paths.check(columns)
    assert schema.columns[1].arrow_type == schema.columns[2].arrow_type == pa.decimal128(38, 18)
    paths.check_key(columns)


def test_T05_numeric_nan_and_infinity_are_kept_as_text(paths: BothPaths) -> None:
    columns: dict[str, list[tuple[str, Any]]] = {
        "numeric": [
            ("'NaN'", Exactly("NaN")),
            ("'Infinity'", Exactly("Infinity")),
            ("'-Infinity'", Exactly("-Infinity")),
        ],
        "numeric(12,2)": [("'NaN'", Exactly("NaN")), ("1", Decimal("1.00"))],
    }
    paths.check(columns)
    paths.check_key(columns)


@pytest.mark.versions(15, 18)
def test_T06_odd_scales_have_a_decimal_with_room_for_them(paths: BothPaths) -> None:
    schema = paths.check(
        {
            "numeric(5,-2)": [
                ("1234567", Decimal(1234600)),
                ("-9999900", Decimal(-9999900)),
                ("'NaN'", Exactly("NaN")),
            ],
            "numeric(3,5)": [("0.00999", Decimal("0.00999")), ("-0.00001", Decimal("-0.00001"))],
            "numeric(38,-1)": [
                ("1234567890123", Decimal("1234567890120.000000000000000000")),
                ("1e38", Exactly("1" + "0" * 38)),
            ],
        }
    )
    assert [column.arrow_type for column in schema.columns[1:4]] == [
        pa.decimal128(*each) for each in ((7, 0), (5, 5), (38, 18))
    ]


def test_T07_money_is_a_decimal_by_the_locale_of_our_connections(paths: BothPaths) -> None:
    """POSIX is another name for C, and the only other locale that every server has."""
    paths.database.execute(f"ALTER DATABASE {paths.database.name} SET lc_monetary = 'POSIX'")
    assert paths.setting("lc_monetary") == "POSIX"
    for opened in (connect(paths.address), connect_replication(paths.address)):
        with opened as connection:
            assert connection.execute("SHOW lc_monetary").fetchone() == ("C",)
    columns: dict[str, list[tuple[str, Any]]] = {
        "money": [
            ("'$1,234.56'", Decimal("1234.56")),
            ("'-0.01'", Decimal("-0.01")),
            ("'92233720368547758.07'", Decimal("92233720368547758.07")),
            ("'-92233720368547758.08'", Decimal("-92233720368547758.08")),
            ("0", Decimal("0.00")),
        ]
    }
    assert paths.check(columns).columns[1].arrow_type == pa.decimal128(19, 2)
    paths.check_key(columns)


def test_T08_bit_strings_are_their_digits(paths: BothPaths) -> None:
    columns = {
        "bit": [("B'1'", "1")],
        "bit(8)": [("B'00000001'", "00000001")],
        "varbit": [("B'10101'", "10101"), ("''", "")],
        "varbit(3)": [("B'0'", "0")],
        "varbit(1)": [("B'1'", "1")],
    }
    paths.check(columns)
    paths.check_key(columns)


def test_T09_character_types_are_equal_by_both_roads(paths: BothPaths) -> None:
    columns = {
        "char(6)": [("'ab'", "ab    "), ("''", "      "), ("'sixsix'", "sixsix")],
        "char": [("'x'", "x"), ("''", " ")],
        '"char"': [("'c'", "c"), ("''", "")],
        "name": same("pg_class", ""),
        "varchar(5)": same("", " ab ", "abcde"),
        "varchar": same("x" * 5000),
        "text": same("", " trailing  ", "NULL", "null"),
    }
    paths.check(columns)
    paths.check_key(columns)


def test_T10_bytea_is_exact_under_any_server_setting(paths: BothPaths) -> None:
    assert paths.setting("bytea_output") == "escape"
    columns = {
        "bytea": [
            ("''", b""),
            (r"'\x00'", b"\0"),
            (r"'\x00ff5c6e'", b"\0\xff\\n"),
            ("'abc'", b"abc"),
            (r"'\xdeadbeef'", b"\xde\xad\xbe\xef"),
        ]
    }
    paths.check(columns)
    paths.check_key(columns)


def test_T11_every_character_is_kept(paths: BothPaths) -> None:
    texts = ("é", "漢", "🙂", "a\nb\tc\rd", "'\"\\", "{,}", '{"a"}', "\\x41", "\u00a0\u200d", "\x7f\x01")
    columns = {"text": same(*texts), "varchar(20)": same(*texts), "jsonb": [("""'"🙂\\n"'""", '"🙂\\n"')]}
    paths.check(columns)
    paths.check_key({"text": same(*texts)})


def test_T12_dates_are_exact_or_their_text(paths: BothPaths) -> None:
    columns: dict[str, list[tuple[str, Any]]] = {
        "date": [
            ("'2024-02-29'", date(2024, 2, 29)),
            ("'0001-01-01'", date(1, 1, 1)),
            ("'1582-10-04'", date(1582, 10, 4)),
            ("'1582-10-10'", date(1582, 10, 10)),
            ("'9999-12-31'", date(9999, 12, 31)),
            ("'infinity'", Exactly("infinity")),
            ("'-infinity'", Exactly("-infinity")),
            ("'0044-03-15 BC'", Exactly("0044-03-15 BC")),
            ("'5874897-12-31'", Exactly("5874897-12-31")),
            ("'10000-01-01'", Exactly("10000-01-01")),
        ]
    }
    paths.check(columns)
    paths.check_key(columns)


def test_T13_times_of_day_are_text(paths: BothPaths) -> None:
    columns = {
        "time": [("'00:00'", "00:00:00"), ("'24:00'", "24:00:00"), ("'23:59:59.999999'", "23:59:59.999999")],
        "time(2)": [("'12:34:56.789'", "12:34:56.79")],
        "timetz": [
            ("'12:00+05:30'", "12:00:00+05:30"),
            ("'24:00-15:59:59'", "24:00:00-15:59:59"),
            ("'00:00+00'", "00:00:00+00"),
        ],
    }
    paths.check(columns)
    paths.check_key(columns)


def test_T14_timestamps_are_exact_or_their_text(paths: BothPaths) -> None:
    def at(*parts: int) -> datetime:
        return datetime(*parts)  # type: ignore[arg-type]  # noqa: DTZ001

    columns: dict[str, list[tuple[str, Any]]] = {
        "timestamp": [
            ("'2024-03-31 02:30:00'", at(2024, 3, 31, 2, 30)),
            ("'2024-02-29 23:59:59.999999'", at(2024, 2, 29, 23, 59, 59, 999_999)),
            ("'1500-02-28 12:00:00.5'", at(1500, 2, 28, 12, 0, 0, 500_000)),
            ("'0001-01-01 00:00:00'", at(1, 1, 1)),
            ("'9999-12-31 23:59:59.999999'", at(9999, 12, 31, 23, 59, 59, 999_999)),
            ("'infinity'", Exactly("infinity")),
            ("'-infinity'", Exactly("-infinity")),
            ("'4713-01-01 00:00:00 BC'", Exactly("4713-01-01 00:00:00 BC")),
            ("'294276-12-31 23:59:59.999999'", Exactly("294276-12-31 23:59:59.999999")),
        ],
        "timestamp(0)": [("'2024-01-01 00:00:00.6'", at(2024, 1, 1, 0, 0, 1))],
        "timestamp(3)": [("'2024-01-01 00:00:00.1239'", at(2024, 1, 1, 0, 0, 0, 124_000))],
    }
    paths.check(columns)
    paths.check_key(columns)


def test_T15_moments_are_exact_or_their_text_in_utc(paths: BothPaths) -> None:
    assert paths.setting("timezone") == "Asia/Kolkata"
    columns: dict[str, list[tuple[str, Any]]] = {
        "timestamptz": [
            ("'2024-03-31 02:30:00+02'", datetime(2024, 3, 31, 0, 30, tzinfo=UTC)),
            ("'1890-01-01 00:00:00.000001+00'", datetime(1890, 1, 1, 0, 0, 0, 1, tzinfo=UTC)),
            ("'0001-01-01 00:00:00+00'", datetime(1, 1, 1, tzinfo=UTC)),
            ("'9999-12-31 23:59:59.999999+00'", datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)),
            ("'9999-12-31 23:59:59.999999-01'", Exactly("10000-01-01 00:59:59.999999+00")),
            ("'infinity'", Exactly("infinity")),
            ("'-infinity'", Exactly("-infinity")),
            ("'0044-03-15 12:00:00+00 BC'", Exactly("0044-03-15 12:00:00+00 BC")),
        ],
        "timestamptz(1)": [
            ("'2024-01-01 00:00:00.16+00'", datetime(2024, 1, 1, 0, 0, 0, 200_000, tzinfo=UTC))
        ],
    }
    paths.check(columns)
    paths.check_key(columns)


def test_T16_intervals_lose_nothing(paths: BothPaths) -> None:
    columns = {
        "interval": [
            ("'1 year 2 mons 3 days 04:05:06.789'", "P1Y2M3DT4H5M6.789S"),
            ("'-1 year 2 mons -3 days 04:05:06'", "P-10M-3DT4H5M6S"),
            ("'1 mon -1 day -00:00:00.000001'", "P1M-1DT-0.000001S"),
            ("'0'", "PT0S"),
            ("'178000000 years'", "P178000000Y"),
            ("'30 days'", "P30D"),
            ("'1 mon'", "P1M"),
            ("'24 hours'", "PT24H"),
        ],
        "interval(2)": [("'1.239 seconds'", "PT1.24S")],
        "interval year to month": [("'14 months'", "P1Y2M")],
    }
    paths.check(columns)
    paths.check_key({"interval": [("'1 year'", "P1Y"), ("'-1 day'", "P-1D")]})


def test_T17_json_is_its_text(paths: BothPaths) -> None:
    big = '{"k": "' + "x" * 100_000 + '"}'
    documents = same("null", "1", '"s"', "true", "[]", '{"a":  [1, 2.50], "a": null}')
    paths.check(
        {
            "json": [*documents, (f"'{big}'", big)],
            "jsonb": [
                *documents[:5],
                ("""'{"b":1,"a":[1,2.50]}'""", '{"a": [1, 2.50], "b": 1}'),
                (f"'{big}'", big),
            ],
            "jsonpath": [("'$.a[*]'", '$."a"[*]')],
        }
    )
    paths.check_key({"jsonb": same("1", "null")})


def test_T18_uuid_and_xml_are_their_text(paths: BothPaths) -> None:
    columns = {
        "uuid": [
            (f"'{UUID.upper()}'", UUID),
            ("'00000000-0000-0000-0000-000000000000'", "00000000-0000-0000-0000-000000000000"),
        ]
    }
    paths.check({**columns, **({"xml": same("<a b='1'>&amp;</a>", "text")} if _has_xml(paths) else {})})
    paths.check_key(columns)


def _has_xml(paths: BothPaths) -> bool:
    """Servers may be built without it."""
    with paths.database.connect() as connection:
        try:
            connection.execute("SELECT '<a/>'::xml")
        except Exception:  # noqa: BLE001 - whatever the reason
            return False
    return True


def test_T19_network_addresses_are_their_text(paths: BothPaths) -> None:
    columns = {
        "inet": same("10.0.0.1", "10.0.0.1/8", "::1", "2001:db8::/32"),
        "cidr": same("10.0.0.0/8", "10.0.0.1/32", "::/0"),
        "macaddr": same("08:00:2b:01:02:03"),
        "macaddr8": same("08:00:2b:01:02:03:04:05"),
    }
    paths.check(columns)
    paths.check_key(columns)


def test_T20_geometric_types_are_their_text(paths: BothPaths) -> None:
    paths.check(
        {
            "point": same("(1,2.5)", "(NaN,Infinity)"),
            "box": same("(1,1),(0,0)"),
            "lseg": same("[(0,0),(1,1)]"),
            "path": same("((0,0),(1,1))", "[(0,0),(1,1)]"),
            "polygon": same("((0,0),(1,1),(1,0))"),
            "circle": same("<(0,0),1.5>"),
            "line": same("{1,-1,0}"),
        }
    )


def test_T32_every_other_type_is_its_text(paths: BothPaths) -> None:
    paths.database.execute(
        "CREATE TYPE custom; CREATE FUNCTION custom_in(cstring) RETURNS custom "
        "LANGUAGE internal IMMUTABLE STRICT AS 'textin'"
    )
    paths.database.execute(
        "CREATE FUNCTION custom_out(custom) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'textout'"
    )
    paths.database.execute("CREATE TYPE custom (INPUT = custom_in, OUTPUT = custom_out)")
    paths.check(
        {
            "pg_lsn": same("0/16B3748", "FFFFFFFF/FFFFFFFF"),
            "xid8": same("18446744073709551615"),
            "xid": same("4294967295"),
            "tid": same("(0,1)"),
            "txid_snapshot": same("10:20:10,14,15"),
            "pg_snapshot": same("10:20:10,14,15"),
            "regtype": same("integer"),
            "refcursor": same("c"),
            "int2vector": same("1 2 3", ""),
            "oidvector": same("1 2"),
            "custom": same("anything at all", '"{,}'),
        }
    )
    paths.check_key({"pg_lsn": same("0/16B3748"), "xid8": same("18446744073709551615")})
