"""Which spooled values stop their table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.change import EXACT_TYPE, ChangeCounts
from penstock.errors import UnreadableTextError, UnrepresentableError
from penstock.spool import SpoolReader, SpoolWriter
from penstock.spool.range import FileSlice
from penstock.spool.values import check_values
from tests.unit.spool.builders import ORDERS, Commit, at, transactions


def _spooled(root: Path, exact: list[dict[str, str] | None], counts: ChangeCounts) -> tuple[FileSlice, ...]:
    """One row a transaction, at positions 10, 20, …, with these exact texts."""
    step = transactions(*(Commit(10 * number) for number in range(1, len(exact) + 1)))
    (batch,) = step.batches
    column = pa.array([None if each is None else list(each.items()) for each in exact], EXACT_TYPE)
    rows = batch.rows.set_column(batch.rows.num_columns - 1, batch.rows.schema.field("_exact"), column)
    writer = SpoolWriter(root, at(1))
    writer.append(replace(step, batches=(replace(batch, rows=rows, counts=batch.counts + counts),)))
    writer.seal()
    writer.close()
    return SpoolReader(root).read(at(1), at(10 * len(exact))).tables[ORDERS.name].slices


def test_an_inexact_value_stops_the_table_only_where_the_operator_said_so(tmp_path: Path) -> None:
    slices = _spooled(tmp_path, [None, {"total": "NaN-secret"}], ChangeCounts(inexact=1))
    check_values(ORDERS.name, slices, refuse_inexact=False)
    with pytest.raises(UnrepresentableError, match=r"column 'total' of public\.orders") as caught:
        check_values(ORDERS.name, slices, refuse_inexact=True)
    assert caught.value.hint
    assert "secret" not in str(caught.value)


def test_T11_an_unreadable_text_always_stops_its_table(tmp_path: Path) -> None:
    slices = _spooled(tmp_path, [{"total": "NaN"}, {"tags": "{caf\ufffd}"}], ChangeCounts(inexact=2, unreadable=1))
    with pytest.raises(UnreadableTextError, match=r"column 'tags' of public\.orders") as caught:
        check_values(ORDERS.name, slices, refuse_inexact=False)
    assert caught.value.hint
    assert "caf" not in str(caught.value)


def test_values_outside_of_the_wanted_range_do_not_count(tmp_path: Path) -> None:
    (whole,) = _spooled(tmp_path, [{"total": "NaN"}, None, {"total": "NaN"}], ChangeCounts(inexact=2))
    check_values(ORDERS.name, [replace(whole, after=at(10), upto=at(20))], refuse_inexact=True)
    with pytest.raises(UnrepresentableError):
        check_values(ORDERS.name, [replace(whole, after=at(10))], refuse_inexact=True)
    with pytest.raises(UnrepresentableError):
        check_values(ORDERS.name, [replace(whole, upto=at(20))], refuse_inexact=True)
