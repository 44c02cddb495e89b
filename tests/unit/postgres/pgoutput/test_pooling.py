"""Small batches of many tables, decoded together."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.change import ChangeBatch, Transactions
from penstock.postgres.pgoutput import rows
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from tests.support.pgoutput_builder import (
    Table,
    TableColumn,
    Value,
    begin,
    commit,
    delete,
    insert,
    relation,
    truncate,
    update,
)
from tests.support.pgoutput_streams import StreamWriter

ID = TableColumn("id", 23, is_key=True)
FIRST = Table(7, "first", (ID, TableColumn("name"), TableColumn("tags", 1009), TableColumn("price", 1700)))
SECOND = Table(8, "second", (ID, TableColumn("price", 1700), TableColumn("seen", 1184)))


def decode(*changes: bytes) -> tuple[ChangeBatch, ...]:
    (step,) = PgOutputDecoder().decode([begin(1), relation(FIRST), relation(SECOND), *changes, commit(100)])
    assert isinstance(step, Transactions)
    return step.batches


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each attempt to pool batches succeeded."""
    made: list[bool] = []
    read_together = rows.read_together

    def read(buffer: pa.Buffer, wanted: list[rows.Wanted]) -> list[rows.Read] | None:
        found = read_together(buffer, wanted)
        made.append(found is not None)
        return found

    monkeypatch.setattr(rows, "read_together", read)
    return made


def test_batches_read_together_are_the_same_as_read_one_by_one(
    monkeypatch: pytest.MonkeyPatch, readings: list[bool]
) -> None:
    writers = [StreamWriter.start(seed, 6) for seed in range(20)]
    for writer in writers:
        writer.transaction(60)
    together = [PgOutputDecoder(writer.keys).decode(writer.messages) for writer in writers]
    assert readings.count(True) > 10
    monkeypatch.setattr(rows, "SMALL_ROWS", -1)
    readings.clear()
    assert [PgOutputDecoder(writer.keys).decode(writer.messages) for writer in writers] == together
    assert readings == []


def test_they_can_be_written_and_read_back(readings: list[bool], tmp_path: Path) -> None:
    batches = decode(
        *(insert(7, [b"%d" % at, b"n", b"{a,NULL}", b"NaN" if at % 2 else b"1.5"]) for at in range(5)),
        *(insert(8, [b"%d" % at, b"2.5", b"infinity"]) for at in range(5)),
        update(7, [b"9", b"m", None, b"3"], [b"1", None, None, None]),
        delete(8, [b"2", None, None]),
        truncate(7, 8),
    )
    assert readings == [True]
    for batch in batches:
        pq.write_table(pa.Table.from_batches([batch.rows]), tmp_path / "x.parquet")
        assert pq.read_table(tmp_path / "x.parquet").to_pylist() == batch.rows.to_pylist()


def test_a_value_that_its_type_refuses_marks_its_own_table_alone(readings: list[bool]) -> None:
    first, second = decode(insert(7, [b"1", b"n", b"{}", b"1"]), insert(8, [b"1", b"one", None]))
    assert readings == [False]
    assert (first.counts.unreadable, second.counts.unreadable) == (0, 1)
    assert [dict(row) for row in second.rows.column("_exact").to_pylist()] == [{"price": "\ufffdone"}]


def test_a_text_that_is_not_utf8_concerns_its_own_row_alone(readings: list[bool]) -> None:
    first, second = decode(insert(7, [b"1", b"\xff", b"{}", b"1"]), insert(8, [b"1", b"2.5", None]))
    assert readings == [False]
    assert [dict(row) for row in first.rows.column("_exact").to_pylist()] == [{"name": "�"}]
    assert second.rows.column("_exact").to_pylist() == [None]


def test_large_values_are_read_by_themselves(monkeypatch: pytest.MonkeyPatch, readings: list[bool]) -> None:
    monkeypatch.setattr(rows, "_MAX_BYTES", 999)
    values: list[Value] = [b"1", b"n" * 1000, None, None]
    first, _ = decode(insert(7, values), insert(8, [b"1", b"2.5", None]))
    assert readings == [False]
    assert first.rows.column("name").to_pylist() == ["n" * 1000]
