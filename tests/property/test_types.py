"""Types over random values: Python's own formatting and parsing is the oracle."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal, localcontext

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ProtocolError
from penstock.postgres.types.column import TypePolicy
from penstock.postgres.types.registry import decode_column, text_type
from penstock.schema import Column
from tests.support.rounds import rounds
from tests.support.typed_text import decode_text

digits = st.text("0123456789", max_size=60)


@st.composite
def numerals(draw: st.DrawFn) -> str:
    whole = draw(digits).lstrip("0") or "0"
    fraction = draw(digits)
    return draw(st.sampled_from(["", "-"])) + whole + (f".{fraction}" if fraction else "")


def fits(text: str, precision: int, scale: int) -> bool:
    whole, _, fraction = text.lstrip("-").partition(".")
    return len(whole.lstrip("0")) <= precision - scale and len(fraction.rstrip("0")) <= scale


@given(st.lists(numerals() | st.none(), max_size=20), st.integers(1, 38), st.data())
@settings(max_examples=rounds(100), deadline=None)
def test_numeric_is_exact_or_marked(texts: list[str | None], precision: int, data: st.DataObject) -> None:
    scale = data.draw(st.integers(0, precision))
    decoded = decode_text(pa.array(texts, pa.string()), 1700, (precision << 16 | scale) + 4)
    marks = decoded.inexact.to_pylist() if decoded.inexact is not None else [False] * len(texts)
    with localcontext(prec=200):
        for text, value, inexact in zip(texts, decoded.values.to_pylist(), marks, strict=True):
            held = text is not None and fits(text, precision, scale)
            assert inexact == (text is not None and not held)
            assert value == (Decimal(text) if held and text is not None else None)


@given(st.lists(st.binary(max_size=20) | st.none(), max_size=20), st.data())
@settings(max_examples=100, deadline=None)
def test_bytea_reads_back(values: list[bytes | None], data: st.DataObject) -> None:
    low = data.draw(st.integers(0, len(values)))
    texts = pa.array([None if value is None else rf"\x{value.hex()}" for value in values], pa.string())
    assert decode_text(texts[low:], 17).values.to_pylist() == values[low:]


@given(st.lists(st.datetimes() | st.none(), max_size=20))
@settings(max_examples=100, deadline=None)
def test_moments_read_back(values: list[datetime | None]) -> None:
    def texts(zone: str) -> pa.StringArray:
        return pa.array(
            [None if value is None else value.isoformat(" ") + zone for value in values], pa.string()
        )

    assert decode_text(texts(""), 1114).values.to_pylist() == values
    aware = [None if value is None else value.replace(tzinfo=UTC) for value in values]
    assert decode_text(texts("+00"), 1184).values.to_pylist() == aware


@given(st.lists(st.dates() | st.none(), max_size=20))
@settings(max_examples=50, deadline=None)
def test_dates_read_back(values: list[date | None]) -> None:
    texts = pa.array([None if value is None else value.isoformat() for value in values], pa.string())
    assert decode_text(texts, 1082).values.to_pylist() == values


@given(
    st.lists(st.floats(allow_nan=False) | st.none(), max_size=20),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
)
@settings(max_examples=100, deadline=None)
def test_numbers_read_back(floats: list[float | None], integers: list[int]) -> None:
    texts = [None if value is None else repr(value).replace("inf", "Infinity") for value in floats]
    assert decode_text(pa.array(texts, pa.string()), 701).values.to_pylist() == floats
    assert (
        decode_text(pa.array([str(value) for value in integers], pa.string()), 20).values.to_pylist()
        == integers
    )


def _array_text(value: list[str | None]) -> str:
    """As Postgres writes it: quotes only where they are needed."""

    def element(text: str | None) -> str:
        if text is None:
            return "NULL"
        plain = text and text.upper() != "NULL" and not any(sign in text for sign in '{}",\\ \t\n\r\v\f')
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        return text if plain else f'"{escaped}"'

    return "{" + ",".join(map(element, value)) + "}"


def _column(reader: str, arrow_type: pa.DataType) -> Column:
    return Column("x", arrow_type, 99_999, -1, reader)


awkward = st.text('ab{}[]",\\ \n=>NULnul🙂é', max_size=8)


@given(st.lists(st.lists(awkward | st.none(), max_size=6) | st.none(), max_size=12), st.data())
@settings(max_examples=rounds(100), deadline=None)
def test_arrays_of_text_read_back(values: list[list[str | None] | None], data: st.DataObject) -> None:
    low = data.draw(st.integers(0, len(values)))
    texts = pa.array([None if value is None else _array_text(value) for value in values], pa.string())
    decoded = decode_column(texts[low:], _column("text[]", pa.list_(pa.string())))
    decoded.values.validate(full=True)
    assert decoded.values.to_pylist() == values[low:]
    assert decoded.inexact is None


@given(
    st.lists(
        st.lists(st.lists(st.integers(-9, 9) | st.none(), min_size=1, max_size=3), max_size=2), max_size=8
    )
)
@settings(max_examples=rounds(100), deadline=None)
def test_arrays_of_numbers_are_lists_or_marked(values: list[list[list[int | None]]]) -> None:
    """A list with two lists in it represents an array of two dimensions, any other its elements."""

    def text(value: list[list[int | None]]) -> str:
        rows = ["{" + ",".join("NULL" if each is None else str(each) for each in row) + "}" for row in value]
        return rows[0] if len(rows) == 1 else "{" + ",".join(rows) + "}"

    decoded = decode_column(
        pa.array([text(value) for value in values], pa.string()), _column("int4[]", pa.list_(pa.int32()))
    )
    decoded.values.validate(full=True)
    assert decoded.values.to_pylist() == [
        None if len(value) == 2 else [each for row in value for each in row] for value in values
    ]
    marks = decoded.inexact.to_pylist() if decoded.inexact is not None else [False] * len(values)
    assert marks == [len(value) == 2 for value in values]


@given(st.lists(st.dictionaries(awkward, awkward | st.none(), max_size=4) | st.none(), max_size=12))
@settings(max_examples=rounds(100), deadline=None)
def test_hstore_reads_back(values: list[dict[str, str | None] | None]) -> None:
    def quoted(text: str) -> str:
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'

    def text(value: dict[str, str | None]) -> str:
        return ", ".join(
            f"{quoted(key)}=>{'NULL' if item is None else quoted(item)}" for key, item in value.items()
        )

    texts = pa.array([None if value is None else text(value) for value in values], pa.string())
    decoded = decode_column(texts, _column("hstore", pa.map_(pa.string(), pa.string())))
    decoded.values.validate(full=True)
    assert [None if value is None else dict(value) for value in decoded.values.to_pylist()] == values
    assert decoded.inexact is None


@given(
    st.sampled_from(["int4[]", "text[]", "bytea[]", "hstore", "vector", "sparsevec", "geometry", "hstore[]"]),
    st.lists(awkward, max_size=6),
)
@settings(max_examples=rounds(100), deadline=None)
def test_any_text_is_read_or_refused(reader: str, texts: list[str]) -> None:
    """No input causes another error or an invalid Arrow array."""
    column = _column(reader, text_type(reader).arrow_type(-1, TypePolicy.DEFAULT))
    try:
        decoded = decode_column(pa.array(texts, pa.string()), column)
    except ProtocolError:
        return
    decoded.values.validate(full=True)
    assert len(decoded.values) == len(texts)
