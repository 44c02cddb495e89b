from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import storage
from penstock.change import Idle, Transactions, change_schema
from penstock.errors import SpoolError
from penstock.schema import Column
from penstock.spool import SpoolReader, SpoolWriter
from tests.support.spool.builders import (
    ITEMS,
    ORDERS,
    Commit,
    all_changes,
    at,
    batch,
    capture,
    changes,
    committed,
    piece,
    time_of,
    transactions,
)

WIDER = replace(ORDERS, columns=(*ORDERS.columns, Column("extra", pa.string(), 25)))


def test_a_seal_makes_one_segment_of_everything_buffered(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(10))
    writer.append(transactions(Commit(20, (ORDERS, ITEMS)), Commit(30)))
    writer.append(transactions(Commit(40, (ITEMS,))))
    assert (writer.pending_rows, writer.end) == (4, at(10))
    assert SpoolReader(tmp_path).segments() == ()
    sealed = writer.seal()
    assert sealed is not None
    assert SpoolReader(tmp_path).segments() == (sealed,)
    assert (sealed.start, sealed.end, sealed.transactions, sealed.commit_time) == (
        at(10),
        at(40),
        3,
        time_of(40),
    )
    assert [(file.schema, file.rows, file.min_position, file.max_position) for file in sealed.files] == [
        (ORDERS, 2, at(20), at(30)),
        (ITEMS, 2, at(20), at(40)),
    ]
    assert (writer.pending_rows, writer.pending_bytes, writer.end) == (0, 0, at(40))


def test_files_have_exactly_the_schema_of_a_change_batch(tmp_path: Path) -> None:
    capture(tmp_path, 0, [[Commit(10)], [Commit(20)]])
    paths = list(tmp_path.glob("segments/*/*.parquet"))
    assert len(paths) == 2
    assert all(pq.read_schema(path).equals(change_schema(ORDERS)) for path in paths)
    assert all(
        pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "UNCOMPRESSED" for path in paths
    )


def test_a_returning_schema_version_gets_its_own_file_too(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    for position, table in ((10, ORDERS), (20, WIDER), (30, ORDERS)):
        writer.append(transactions(Commit(position, (table,))))
    writer.seal()
    found = SpoolReader(tmp_path).read(at(0), at(30))
    assert [part.file.schema for part in found.tables[ORDERS.name].slices] == [ORDERS, WIDER, ORDERS]
    assert changes(found) == {"orders": [("orders", 10, 0), ("orders", 20, 0), ("orders", 30, 0)]}


def test_nothing_is_sealed_without_waiting_rows_unless_quiet_is_set(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(10))
    writer.append(Idle(at(50)))
    writer.append(Transactions((), at(60), time_of(60), 4))
    assert writer.seal() is None
    sealed = writer.seal(quiet=True)
    assert sealed is not None
    assert (sealed.start, sealed.end, sealed.files, sealed.transactions) == (at(10), at(60), (), 4)
    assert writer.seal(quiet=True) is None


def test_a_quiet_position_is_sealed_beyond_the_last_transaction(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(transactions(Commit(10)))
    writer.append(Idle(at(30)))
    first, second = writer.seal(quiet=True), writer.seal(quiet=True)
    assert first is not None
    assert second is not None
    assert [(each.start, each.end) for each in (first, second)] == [(at(0), at(10)), (at(10), at(30))]
    assert all_changes(tmp_path) == Counter(Commit(10).seen())


def test_ground_without_rows_is_covered_by_the_next_segment(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(Transactions((), at(10), time_of(10), 1))
    writer.append(piece(7, (ORDERS, 0)))
    assert [(each.start, each.end, each.transactions) for each in writer.append(committed(7, 20))] == [
        (at(0), at(20), 2)
    ]


def test_the_writer_seals_at_the_hard_limit(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0), max_segment_bytes=1)
    assert [each.end for each in writer.append(transactions(Commit(10)))] == [at(10)]
    assert writer.pending_bytes == 0


def test_the_age_is_that_of_the_first_unsealed_row(tmp_path: Path) -> None:
    now = [100.0]
    writer = SpoolWriter(tmp_path, at(0), clock=lambda: now[0])
    assert writer.oldest_pending_age_seconds == 0
    writer.append(transactions(Commit(10)))
    now[0] = 103.0
    writer.append(transactions(Commit(20)))
    assert writer.oldest_pending_age_seconds == 3
    writer.seal()
    assert writer.oldest_pending_age_seconds == 0


@pytest.mark.parametrize("position", [5, 10])
def test_the_log_never_moves_backward(tmp_path: Path, position: int) -> None:
    writer = SpoolWriter(tmp_path, at(10))
    with pytest.raises(SpoolError, match="positions must increase"):
        writer.append(transactions(Commit(position)))


def test_pieces_that_commit_behind_are_refused(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(piece(7, (ORDERS, 0)))
    writer.append(transactions(Commit(20)))
    with pytest.raises(SpoolError, match="positions must increase"):
        writer.append(committed(7, 20))


@pytest.mark.parametrize("position", [10, 31, None])
def test_rows_that_lie_outside_their_transactions_are_refused(tmp_path: Path, position: int | None) -> None:
    writer = SpoolWriter(tmp_path, at(10))
    with pytest.raises(SpoolError, match=r"public\.orders"):
        writer.append(Transactions((batch(ORDERS, [(position, 0)]),), at(30), time_of(30), 1))


def test_a_batch_with_other_columns_than_its_table_is_refused(tmp_path: Path) -> None:
    wrong = replace(batch(ORDERS, [(20, 0)]), table=WIDER)
    with pytest.raises(SpoolError, match="columns"):
        SpoolWriter(tmp_path, at(0)).append(Transactions((wrong,), at(20), time_of(20), 1))


def test_after_an_error_a_writer_takes_nothing_more(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(10))
    with pytest.raises(SpoolError):
        writer.append(transactions(Commit(5)))
    with pytest.raises(SpoolError, match="open a new one"):
        writer.append(transactions(Commit(20)))


def test_a_new_writer_removes_unsealed_files(tmp_path: Path) -> None:
    capture(tmp_path, 0, [[Commit(10)]])
    (tmp_path / "segments" / f"{20:016X}").mkdir()
    (tmp_path / "segments" / f"{20:016X}" / "half.parquet").write_bytes(b"PAR1")
    (tmp_path / "open" / "7").mkdir(parents=True)
    SpoolWriter(tmp_path, at(10))
    assert [path.name for path in (tmp_path / "segments").iterdir()] == [f"{10:016X}"]
    assert not (tmp_path / "open").exists()


def test_file_names_are_plain_for_every_table_name(tmp_path: Path) -> None:
    odd = replace(ORDERS, name=replace(ORDERS.name, schema="_hidden", name="../{a,b}*é=1" * 30))
    capture(tmp_path, 0, [[Commit(10, (odd,))]])
    (path,) = tmp_path.glob("segments/*/*.parquet")
    assert set(path.name) <= set("ABCDEFabcdefghijklmnopqrstuvwxyz0123456789_-.")
    assert path.name[0] not in "_."
    assert list(SpoolReader(tmp_path).read(at(0), at(10)).tables) == [odd.name]


@pytest.mark.parametrize(
    ("raised", "said"),
    [(OSError(5, "Input/output error"), "Input/output"), (pa.ArrowInvalid("4711"), "ArrowInvalid")],
)
def test_disk_errors_are_our_errors_without_values_and_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, said: str
) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(transactions(Commit(10)))

    def refuse(path: Path) -> None:
        raise raised

    with monkeypatch.context() as patched:
        patched.setattr(storage, "sync_file", refuse)
        with pytest.raises(SpoolError, match=said) as caught:
            writer.seal()
    assert "4711" not in str(caught.value)
    assert SpoolReader(tmp_path).segments() == ()
    capture(tmp_path, 0, [[Commit(10)]])
    assert all_changes(tmp_path) == Counter(Commit(10).seen())
