from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.postgres.copy_text import _split, copy_text

# Any text that Postgres may hold; often characters with a meaning in the format.
TEXTS = st.none() | st.text(st.sampled_from('\\\t\n\r\b\f\v.N"a{}é\ufeff😀'), max_size=8)


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=20))
def test_text_written_for_copy_reads_back_unchanged(rows: list[tuple[str | None, str | None]]) -> None:
    columns = [pa.array([row[at] for row in rows], pa.string()) for at in range(2)]
    assert [column.to_pylist() for column in _split(memoryview(bytes(copy_text(columns))), 2)] == [
        column.to_pylist() for column in columns
    ]


@given(st.lists(TEXTS, min_size=1, max_size=9), st.integers(0, 4), st.integers(0, 5))
def test_a_part_of_an_array_is_written_as_that_part_alone(
    values: list[str | None], start: int, count: int
) -> None:
    part = pa.array(values, pa.string()).slice(start, count)
    assert bytes(copy_text([part])) == bytes(copy_text([pa.array(part.to_pylist(), pa.string())]))


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, b"\\N\n"),
        ("", b"\n"),
        ("\\N", b"\\\\N\n"),
        ("\\.", b"\\\\.\n"),
        ("a\tb", b"a\\tb\n"),
        ("\r\n", b"\\r\\n\n"),
    ],
)
def test_null_and_similar_texts_are_distinguished(value: str | None, written: bytes) -> None:
    assert bytes(copy_text([pa.array([value], pa.string())])) == written
