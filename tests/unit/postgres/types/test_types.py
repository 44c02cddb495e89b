"""Each type family against values written by hand. A value is (Postgres text, expected Python value)."""

from __future__ import annotations

import math
import uuid
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import ProtocolError, UnreadableTextError
from penstock.postgres.types.rows import decode_rows
from penstock.schema import Column, TableName, TableSchema
from tests.support.typed_text import arrow_type, decode_text

BOOL, BYTEA, CHAR, NAME, INT8, INT2, INT4, TEXT, OID, JSON = 16, 17, 18, 19, 20, 21, 23, 25, 26, 114
FLOAT4, FLOAT8, BPCHAR, VARCHAR, DATE, TIMESTAMP, TIMESTAMPTZ, NUMERIC, UUID, JSONB = (
    700,
    701,
    1042,
    1043,
    1082,
    1114,
    1184,
    1700,
    2950,
    3802,
)
INET, MONEY, UNKNOWN_EXTENSION = 869, 790, 999_999


def numeric(precision: int, scale: int) -> int:
    return (precision << 16 | scale & 0x7FF) + 4


HELD: list[tuple[int, int, str, Any]] = [
    (BOOL, -1, "t", True),
    (BOOL, -1, "f", False),
    (INT2, -1, "-32768", -32768),
    (INT4, -1, "2147483647", 2147483647),
    (INT8, -1, "-9223372036854775808", -(2**63)),
    (OID, -1, "4294967295", 4294967295),
    (FLOAT4, -1, "3.4028235e+38", 3.4028234663852886e38),
    (FLOAT8, -1, "1e+300", 1e300),
    (FLOAT8, -1, "-Infinity", -math.inf),
    (FLOAT8, -1, "5e-324", 5e-324),
    (NUMERIC, numeric(12, 2), "-1234567890.12", Decimal("-1234567890.12")),
    (NUMERIC, numeric(38, 0), "9" * 38, Decimal("9" * 38)),
    (NUMERIC, numeric(2, 2), "0.05", Decimal("0.05")),
    (NUMERIC, numeric(5, -2), "-1234500", Decimal(-1234500)),
    (
        NUMERIC,
        -1,
        "12345678901234567890.123456789012345678",
        Decimal("12345678901234567890.123456789012345678"),
    ),
    (NUMERIC, -1, "-0.5" + "0" * 60, Decimal("-0.5")),
    (NUMERIC, -1, "7." + "0" * 60, Decimal(7)),
    (TEXT, -1, "é漢🙂\n'\\", "é漢🙂\n'\\"),
    (BPCHAR, 9, "ab   ", "ab   "),
    (VARCHAR, -1, "", ""),
    (NAME, -1, "pg_class", "pg_class"),
    (CHAR, -1, "c", "c"),
    (BYTEA, -1, r"\x", b""),
    (BYTEA, -1, r"\x00ff10ab", b"\x00\xff\x10\xab"),
    (DATE, -1, "2024-02-29", date(2024, 2, 29)),
    (DATE, -1, "0001-01-01", date(1, 1, 1)),
    (DATE, -1, "9999-12-31", date(9999, 12, 31)),
    (TIMESTAMP, -1, "2024-02-29 23:59:59.5", datetime(2024, 2, 29, 23, 59, 59, 500_000)),  # noqa: DTZ001
    (TIMESTAMPTZ, -1, "2024-02-29 23:59:59.123456+00", datetime(2024, 2, 29, 23, 59, 59, 123_456, UTC)),
    (TIMESTAMPTZ, -1, "0001-01-01 00:00:00+00", datetime(1, 1, 1, tzinfo=UTC)),
    (UUID, -1, str(uuid.UUID(int=7)), str(uuid.UUID(int=7))),
    (JSON, -1, '{"a":  1}', '{"a":  1}'),
    (JSONB, -1, "null", "null"),
    (INET, -1, "10.0.0.1", "10.0.0.1"),
    (MONEY, -1, "-$1,000.00", Decimal("-1000.00")),
    (UNKNOWN_EXTENSION, 7, "(1,2)", "(1,2)"),
]

NOT_HELD = [
    (NUMERIC, -1, "NaN"),
    (NUMERIC, -1, "-Infinity"),
    (NUMERIC, numeric(12, 2), "NaN"),
    (NUMERIC, -1, "0.0000000000000000001"),
    (NUMERIC, -1, f"0.{1:057}"),  # Arrow's own cast gives 0 here, without an error
    (NUMERIC, numeric(38, 0), f"0.{1:039}"),
    (NUMERIC, -1, "123456789012345678901"),
    (NUMERIC, -1, "340282366920938463464"),
    (NUMERIC, numeric(36, 30), "2723000000"),
    (NUMERIC, numeric(50, 0), "1" * 50),
    (NUMERIC, -1, "9" * 1000 + "." + "9" * 1000),
    (DATE, -1, "infinity"),
    (DATE, -1, "-infinity"),
    (DATE, -1, "0044-03-15 BC"),
    (DATE, -1, "5874897-12-31"),
    (TIMESTAMP, -1, "-infinity"),
    (TIMESTAMP, -1, "294276-12-31 23:59:59.999999"),
    (TIMESTAMP, -1, "4713-01-01 00:00:00 BC"),
    (TIMESTAMPTZ, -1, "infinity"),
    (TIMESTAMPTZ, -1, "10000-01-01 00:00:00+00"),
    (TIMESTAMPTZ, -1, "0001-12-31 23:59:59+00 BC"),
]

GARBAGE = [
    (BOOL, "yes"),
    (INT4, "1x"),
    (INT4, ""),
    (INT2, "32768"),
    (FLOAT8, "wide"),
    (NUMERIC, "1,5"),
    (NUMERIC, "--1"),
    (DATE, "2024-02-30"),
    (TIMESTAMP, "2024-02-29 25:00:00"),
    (TIMESTAMPTZ, "2024-02-29 10:00:00"),
    (BYTEA, "abc"),
    (BYTEA, r"\x0"),
    (BYTEA, r"\x0g"),
    (BYTEA, ""),
]


@pytest.mark.parametrize(("oid", "modifier", "text", "value"), HELD)
def test_a_value_that_the_type_can_hold_is_exact(oid: int, modifier: int, text: str, value: object) -> None:
    decoded = decode_text(pa.array([text, None, text]), oid, modifier)
    assert decoded.values.type == arrow_type(oid, modifier)
    assert decoded.values.to_pylist() == [value, None, value]
    assert decoded.inexact is None or decoded.inexact.to_pylist() == [False] * 3


@pytest.mark.parametrize("oid", [FLOAT4, FLOAT8])
def test_T02_nan_is_a_floating_value(oid: int) -> None:
    decoded = decode_text(pa.array(["NaN"]), oid)
    assert math.isnan(decoded.values[0].as_py())
    assert decoded.inexact is None


@pytest.mark.parametrize(("oid", "modifier", "text"), NOT_HELD)
def test_a_value_that_the_type_cannot_hold_is_null_and_marked(oid: int, modifier: int, text: str) -> None:
    held = {
        NUMERIC: "1",
        DATE: "2024-01-01",
        TIMESTAMP: "2024-01-01 00:00:00",
        TIMESTAMPTZ: "2024-01-01 00:00:00+00",
    }[oid]
    decoded = decode_text(pa.array([held, text, None]), oid, modifier)
    decoded.values.validate(full=True)
    assert decoded.values.is_valid().to_pylist() == [True, False, False]
    assert decoded.inexact is not None
    assert decoded.inexact.to_pylist() == [False, True, False]


@pytest.mark.parametrize(("oid", "text"), GARBAGE)
def test_a_text_that_postgres_does_not_write_is_an_error_that_does_not_show_it(oid: int, text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_text(pa.array([text]), oid)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize("oid", [BOOL, INT4, FLOAT8, NUMERIC, TEXT, BYTEA, DATE, TIMESTAMP, TIMESTAMPTZ])
def test_T11_bytes_that_are_not_utf8_are_an_error(oid: int) -> None:
    values = pa.array([b"\xff\xfe1"]).view(pa.string())
    with pytest.raises(UnreadableTextError if oid == TEXT else ProtocolError):
        decode_text(values, oid)


@pytest.mark.parametrize("oid", [BOOL, INT4, NUMERIC, TEXT, BYTEA, DATE, TIMESTAMPTZ])
def test_columns_without_rows_or_without_values_keep_their_type(oid: int) -> None:
    for values in (pa.array([], pa.string()), pa.nulls(3, pa.string())):
        decoded = decode_text(values, oid)
        assert decoded.values.type == arrow_type(oid)
        assert decoded.values.null_count == len(decoded.values) == len(values)


def test_a_cast_to_text_writes_booleans_in_full() -> None:
    assert decode_text(pa.array(["true", None, "false"]), BOOL).values.to_pylist() == [True, None, False]


def test_T10_bytea_decodes_from_slices_with_nulls_over_hidden_text() -> None:
    whole = pa.array([r"\x00", r"\x0102", r"\xaa", r"\x", r"\xbbcc"])
    # The null in the middle still has text under it.
    _, offsets, data = whole.buffers()
    hidden = pa.Array.from_buffers(pa.string(), 5, [pa.py_buffer(bytes([0b11011])), offsets, data])
    assert decode_text(whole[1:4], BYTEA).values.to_pylist() == [b"\x01\x02", b"\xaa", b""]
    assert decode_text(hidden[1:], BYTEA).values.to_pylist() == [b"\x01\x02", None, b"", b"\xbb\xcc"]


@pytest.mark.parametrize(
    ("modifier", "expected"),
    [
        (-1, pa.decimal128(38, 18)),
        (numeric(12, 2), pa.decimal128(12, 2)),
        (numeric(38, 38), pa.decimal128(38, 38)),
        (numeric(39, 2), pa.decimal128(38, 18)),
        (numeric(5, -2), pa.decimal128(7, 0)),
        (numeric(3, 5), pa.decimal128(5, 5)),
        (numeric(37, -2), pa.decimal128(38, 18)),
        (numeric(3, 39), pa.decimal128(38, 18)),
    ],
)
def test_T06_numeric_takes_its_declared_shape_within_38_digits(modifier: int, expected: pa.DataType) -> None:
    assert arrow_type(NUMERIC, modifier) == expected


@pytest.mark.parametrize("text", ["-.5", "-.000", f"-.{'0' * 40}", ".0", "5.", "-", ".", "-.", "1e5", "0.10"])
def test_T06_a_number_is_read_alike_whatever_other_values_are_in_the_column(text: str) -> None:
    """Some of it is never written by Postgres; found by damaging its output."""

    def read(*texts: str) -> object:
        try:
            return decode_text(pa.array(texts), NUMERIC).values[0].as_py()
        except ProtocolError as error:
            return error.message

    assert read(text) == read(text, "9" * 25) == read(text, "NaN")


def test_exact_holds_the_text_of_every_value_that_is_not_held_and_nothing_else() -> None:
    columns = (
        Column("id", pa.int32(), INT4),
        Column("n", pa.decimal128(38, 18), NUMERIC),
        Column("d", pa.date32(), DATE),
    )
    texts = [
        pa.array(["1", "2", "3", "4"]),
        pa.array(["NaN", "1", None, "Infinity"]),
        pa.array(["infinity", "2024-01-01", None, "2024-01-02"]),
    ]
    decoded = decode_rows(texts, TableSchema(1, TableName("s", "t"), columns, ("id",)))
    decoded.exact.validate(full=True)
    assert decoded.inexact == 2
    assert decoded.exact.to_pylist() == [[("n", "NaN"), ("d", "infinity")], None, None, [("n", "Infinity")]]
    assert [column.null_count for column in decoded.columns] == [0, 3, 2]
