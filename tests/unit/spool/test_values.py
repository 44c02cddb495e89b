"""Which spooled values fail their table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.change import EXACT_TYPE, ChangeCounts, Transactions
from penstock.errors import RowUnidentifiedError, SpoolCorruptError, UnreadableTextError, UnrepresentableError
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from penstock.schema import Column, TableSchema
from penstock.spool import SpoolReader, SpoolWriter
from penstock.spool.reader import FileSlice
from penstock.spool.rows import check_identified, check_values, first_rejected
from tests.support.pgoutput_builder import Table, TableColumn, begin, commit, delete, insert, relation
from tests.support.spool.builders import ORDERS, Commit, at, committed, piece, transactions

NAMESAKE = replace(
    ORDERS,
    columns=(
        *ORDERS.columns,
        Column("_commit_version", pa.string(), 25),
        Column("_exact", pa.list_(pa.string()), 1009),
    ),
)
"""A table with columns named like metadata columns."""


def _spooled(
    root: Path, exact: list[dict[str, str] | None], counts: ChangeCounts, table: TableSchema = ORDERS
) -> tuple[FileSlice, ...]:
    """One row a transaction, at positions 10, 20, …, with these exact texts."""
    step = transactions(*(Commit(10 * number) for number in range(1, len(exact) + 1)))
    (batch,) = step.batches
    column = pa.array([None if each is None else list(each.items()) for each in exact], EXACT_TYPE)
    rows = batch.rows.set_column(batch.rows.num_columns - 1, batch.rows.schema.field("_exact"), column)
    for place, own in enumerate(table.columns[len(ORDERS.columns) :], len(ORDERS.columns)):
        rows = rows.add_column(
            place, pa.field(own.name, own.arrow_type), pa.nulls(len(exact), own.arrow_type)
        )
    writer = SpoolWriter(root, at(1))
    writer.append(
        replace(step, batches=(replace(batch, table=table, rows=rows, counts=batch.counts + counts),))
    )
    writer.seal()
    writer.close()
    return SpoolReader(root).read(at(1), at(10 * len(exact))).tables[ORDERS.name].slices


def test_an_inexact_value_stops_the_table_only_where_the_operator_said_so(tmp_path: Path) -> None:
    slices = _spooled(tmp_path, [None, {"total": "NaN-secret"}], ChangeCounts(inexact=1))
    check_values(ORDERS.name, slices, reject_inexact=False)
    with pytest.raises(UnrepresentableError, match=r"column 'total' of public\.orders") as caught:
        check_values(ORDERS.name, slices, reject_inexact=True)
    assert caught.value.hint
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", ["delete", "update_preimage"])
def test_of_an_old_row_only_the_key_can_stop_a_table(tmp_path: Path, kind: str) -> None:
    """The rest of the old row was checked when it was written."""
    (whole,) = _spooled(tmp_path, [{"total": "NaN"}, {"id": "NaN"}], ChangeCounts(inexact=2))
    table = pq.read_table(whole.path)
    place = table.schema.get_field_index("_change_type")
    pq.write_table(table.set_column(place, table.schema.field(place), pa.array([kind] * 2)), whole.path)
    found = first_rejected(ORDERS.name, [whole], reject_inexact=True)
    assert found is not None
    assert (found.version, "column 'id'" in found.error.message) == (20, True)


def test_T11_an_unreadable_text_always_stops_its_table(tmp_path: Path) -> None:
    slices = _spooled(
        tmp_path, [{"total": "NaN"}, {"tags": "{caf\ufffd}"}], ChangeCounts(inexact=2, unreadable=1)
    )
    with pytest.raises(UnreadableTextError, match=r"column 'tags' of public\.orders") as caught:
        check_values(ORDERS.name, slices, reject_inexact=False)
    assert caught.value.hint
    assert "caf" not in str(caught.value)


def test_values_outside_of_the_wanted_range_do_not_count(tmp_path: Path) -> None:
    (whole,) = _spooled(tmp_path, [{"total": "NaN"}, None, {"total": "NaN"}], ChangeCounts(inexact=2))
    check_values(ORDERS.name, [replace(whole, after=at(10), upto=at(20))], reject_inexact=True)
    with pytest.raises(UnrepresentableError):
        check_values(ORDERS.name, [replace(whole, after=at(10))], reject_inexact=True)
    with pytest.raises(UnrepresentableError):
        check_values(ORDERS.name, [replace(whole, upto=at(20))], reject_inexact=True)


def test_table_with_columns_called_as_the_metadata_is_checked_by_the_metadata(tmp_path: Path) -> None:
    (whole,) = _spooled(tmp_path, [None, {"total": "NaN"}, None], ChangeCounts(inexact=1), NAMESAKE)
    check_values(ORDERS.name, [replace(whole, after=at(20))], reject_inexact=True)
    with pytest.raises(UnrepresentableError, match="'total'"):
        check_values(ORDERS.name, [replace(whole, after=at(10))], reject_inexact=True)


def test_first_rejected_value_is_reported_with_its_commit(tmp_path: Path) -> None:
    slices = _spooled(
        tmp_path, [None, {"total": "NaN"}, {"tags": "{\ufffd}"}], ChangeCounts(inexact=2, unreadable=1)
    )
    strict, lax = (first_rejected(ORDERS.name, slices, reject_inexact=refuses) for refuses in (True, False))
    assert strict is not None
    assert (strict.version, type(strict.error)) == (20, UnrepresentableError)
    assert lax is not None
    assert (lax.version, type(lax.error)) == (30, UnreadableTextError)


def test_rejected_value_of_a_streamed_transaction_is_reported_with_its_commit(tmp_path: Path) -> None:
    step = piece(5, (ORDERS, 0))
    (batch,) = step.batches
    column = pa.array([[("total", "NaN")]], EXACT_TYPE)
    rows = batch.rows.set_column(batch.rows.num_columns - 1, batch.rows.schema.field("_exact"), column)
    writer = SpoolWriter(tmp_path, at(1))
    writer.append(
        replace(step, batches=(replace(batch, rows=rows, counts=batch.counts + ChangeCounts(inexact=1)),))
    )
    writer.append(committed(5, 40))
    writer.seal()
    writer.close()
    refused = first_rejected(
        ORDERS.name, SpoolReader(tmp_path).read(at(1), at(40)).tables[ORDERS.name].slices, reject_inexact=True
    )
    assert refused is not None
    assert refused.version == 40


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (whole,) = _spooled(tmp_path, [{"total": "NaN"}], ChangeCounts(inexact=1))
    whole.path.write_bytes(b"no parquet")
    with pytest.raises(SpoolCorruptError):
        check_values(ORDERS.name, [whole], reject_inexact=True)


def test_a_change_that_does_not_identify_its_row_stops_its_table_from_its_commit_on(tmp_path: Path) -> None:
    coded = Table(9, "coded", (TableColumn("id", 23), TableColumn("code", 25, is_key=True)), identity="i")
    log = [relation(coded)]
    for end, change in (
        (10, insert(9, [b"1", b"a"])),
        (20, delete(9, [b"1", None])),
        (30, insert(9, [b"1", b"b"])),
    ):
        log += [begin(end), change, commit(end)]
    (step,) = PgOutputDecoder().decode([log[1], log[0], *log[2:]])
    assert isinstance(step, Transactions)
    writer = SpoolWriter(tmp_path, at(1))
    writer.append(step)
    writer.seal()
    writer.close()
    reader = SpoolReader(tmp_path)
    (name,) = reader.read(at(1), at(30)).tables
    for start, end, found in ((1, 30, 20), (1, 10, None), (20, 30, None), (10, 20, 20)):
        slices = reader.read(at(start), at(end)).tables[name].slices
        refused = first_rejected(name, slices, reject_inexact=False)
        assert (None if refused is None else refused.version) == found
        if found is not None:
            with pytest.raises(RowUnidentifiedError, match=r"a change of public\.coded") as caught:
                check_identified(slices)
            assert "penstock tables resync CONFIG public.coded" in (caught.value.hint or "")
