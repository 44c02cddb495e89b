"""Types over random values: Python's own renderings and parsers are the oracle."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal, localcontext

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.postgres.types.registry import decode_text

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
@settings(max_examples=200, deadline=None)
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
        return pa.array([None if value is None else value.isoformat(" ") + zone for value in values], pa.string())

    assert decode_text(texts(""), 1114).values.to_pylist() == values
    aware = [None if value is None else value.replace(tzinfo=UTC) for value in values]
    assert decode_text(texts("+00"), 1184).values.to_pylist() == aware


@given(st.lists(st.dates() | st.none(), max_size=20))
@settings(max_examples=50, deadline=None)
def test_dates_read_back(values: list[date | None]) -> None:
    texts = pa.array([None if value is None else value.isoformat() for value in values], pa.string())
    assert decode_text(texts, 1082).values.to_pylist() == values


@given(st.lists(st.floats(allow_nan=False) | st.none(), max_size=20), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
@settings(max_examples=100, deadline=None)
def test_numbers_read_back(floats: list[float | None], integers: list[int]) -> None:
    texts = [None if value is None else repr(value).replace("inf", "Infinity") for value in floats]
    assert decode_text(pa.array(texts, pa.string()), 701).values.to_pylist() == floats
    assert decode_text(pa.array([str(value) for value in integers], pa.string()), 20).values.to_pylist() == integers
