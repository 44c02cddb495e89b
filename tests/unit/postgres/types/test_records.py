"""Rows in Postgres text form, split into columns."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ProtocolError
from penstock.postgres.types.quoting import split_records

Value = str | None
_MARKED = frozenset('"\\(), \t\n\r\v\f')

texts = st.one_of(
    st.none(),
    st.text('ab"\\(),  \t\näN', max_size=6),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=3),
)


def written(row: list[Value]) -> str:
    """As `record_out` does it: obvious and slow."""
    return f"({','.join(map(_field, row))})"


def _field(value: Value) -> str:
    if value is None:
        return ""
    doubled = value.replace("\\", "\\\\").replace('"', '""')
    return f'"{doubled}"' if not value or _MARKED & set(value) else doubled


def split(*rows: str, fields: int) -> list[list[Value]]:
    columns = split_records(pa.array(rows, pa.string()), fields)
    return [list(row) for row in zip(*(column.to_pylist() for column in columns), strict=True)]


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("()", [None]),
        ('("")', [""]),
        ("(1,b)", ["1", "b"]),
        ("(,)", [None, None]),
        ('(a,"",)', ["a", "", None]),
        ('("a,b","(x)")', ["a,b", "(x)"]),
        ('("say ""hi""","""")', ['say "hi"', '"']),
        (r'("a\\b","\\\\")', ["a\\b", "\\\\"]),
        ('("{""a"",""b,c""}",1)', ['{"a","b,c"}', "1"]),
    ],
)
def test_a_row_is_cut_where_postgres_put_its_commas(text: str, row: list[Value]) -> None:
    assert split(text, fields=len(row)) == [row]


@given(
    st.integers(1, 4).flatmap(
        lambda fields: st.lists(st.lists(texts, min_size=fields, max_size=fields), min_size=1, max_size=5)
    )
)
def test_every_row_text_is_read_back_unchanged(rows: list[list[Value]]) -> None:
    assert split(*map(written, rows), fields=len(rows[0])) == rows


def test_rows_of_a_sliced_array_are_the_right_ones() -> None:
    rows = pa.array(['("x,")', "(a)", '("b""")', "(c)"], pa.string())[1:3]
    assert [column.to_pylist() for column in split_records(rows, 1)] == [["a", 'b"']]


def test_no_rows_and_no_fields_are_nothing() -> None:
    assert [len(column) for column in split_records(pa.array([], pa.string()), 3)] == [0, 0, 0]
    assert split_records(pa.array(["()"], pa.string()), 0) == []


@pytest.mark.parametrize("text", ["(1,2)", "(1,2,3,4)", "", "(", "1,2,3", '("1,2",3)'])
def test_a_row_of_another_number_of_fields_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        split(text, fields=3)
