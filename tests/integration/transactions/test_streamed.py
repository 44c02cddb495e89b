"""Streamed transactions: each committed one arrives whole and once, and no part of a rolled-back one does."""

from __future__ import annotations

from datetime import datetime

import pytest

from penstock.postgres.pgoutput.decoder import PIECE_MESSAGES
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import release
from tests.support.transactions.source import TransactionSource, WatchedDecoder
from tests.support.waiting import wait_for

FILL = "INSERT INTO public.t SELECT i, 'n' || i FROM generate_series({}, {}) i"


@pytest.mark.versions(14, 15, 16, 17, 18)
def test_X03_interleaved_transactions_with_savepoints_arrive_as_they_committed(
    source: TransactionSource,
) -> None:
    with (
        source.capture() as capture,
        source.database.connect() as a,
        source.database.connect() as b,
        source.database.connect() as c,
    ):
        (xid,) = a.execute("SELECT txid_current()").fetchone() or (0,)
        a.execute(FILL.format(1, 2000))
        b.execute(FILL.format(10_001, 12_000))
        a.execute("SAVEPOINT one")
        a.execute(FILL.format(2001, 4000))
        source.database.execute(FILL.format(20_001, 20_010))
        b.execute("UPDATE public.t SET note = 'b' WHERE id = 10500")
        c.execute(FILL.format(30_001, 33_000))
        a.execute("ROLLBACK TO one")
        a.execute(FILL.format(2001, 3000))
        a.execute("SAVEPOINT two")
        a.execute("DELETE FROM public.t WHERE id < 100")
        a.execute("SAVEPOINT three")
        a.execute("INSERT INTO public.u SELECT i, i FROM generate_series(1, 2000) i")
        a.execute("RELEASE two")
        a.execute("SAVEPOINT four")
        a.execute("TRUNCATE public.u")
        a.execute("UPDATE public.t SET note = 'four'")
        a.execute("ROLLBACK TO four")
        source.database.execute("UPDATE public.t SET id = 40005 WHERE id = 20005")
        b.commit()
        c.rollback()
        a.execute(FILL.format(3001, 3100))
        a.commit()
        source.catch_up(capture)
    for table in ("t", "u"):
        assert source.mirrored(table) == source.actual(table)
    assert len(source.actual("t")) == 2000 + 10 + 3100 - 99
    assert {row["_xid"] for row in source.changes("t") if 1 <= row["id"] <= 3100} == {xid}
    assert {row["_xid"] for row in source.changes("u")} == {xid}
    assert source.left_over == []
    assert source.kinds["S"] == source.kinds["E"] > 10
    assert source.kinds["c"] == 2
    assert source.kinds["A"] >= 1


@pytest.mark.versions(14, 16, 18)
def test_X03_a_transaction_sees_its_own_ddl_and_forgets_rolled_back_ddl(source: TransactionSource) -> None:
    with source.capture() as capture, source.database.connect() as a:
        source.database.execute(FILL.format(1, 10))
        a.execute("INSERT INTO public.u SELECT i, i FROM generate_series(1, 2000) i")
        a.execute("ALTER TABLE public.u ADD COLUMN extra text")
        a.execute("INSERT INTO public.u SELECT i, i, 'x' FROM generate_series(2001, 4000) i")
        a.execute("SAVEPOINT one")
        a.execute("ALTER TABLE public.u ADD COLUMN gone date")
        a.execute("INSERT INTO public.u SELECT i, i, 'x', now() FROM generate_series(4001, 6000) i")
        a.execute("ROLLBACK TO one")
        source.database.execute(FILL.format(11, 20))
        a.execute("INSERT INTO public.u SELECT i, i, 'y' FROM generate_series(6001, 8000) i")
        a.execute("ALTER TABLE public.u RENAME COLUMN n TO m")
        a.execute("INSERT INTO public.u SELECT i, i, 'z' FROM generate_series(8001, 10000) i")
        a.commit()
        source.database.execute("INSERT INTO public.u VALUES (10001, 1, 'after')")
        with source.database.connect() as b:
            b.execute("ALTER TABLE public.u ADD COLUMN never int")
            b.execute("INSERT INTO public.u SELECT i, i, 'z', 1 FROM generate_series(20001, 22000) i")
            b.rollback()
        source.database.execute("INSERT INTO public.u VALUES (10002, 2, 'last')")
        source.catch_up(capture)
    assert source.kinds["A"] >= 1
    rows = {row["id"]: {name for name in row if not name.startswith("_")} for row in source.changes("u")}
    assert len(rows) == 8002
    for key, names in (
        (1, {"id", "n"}),
        (2001, {"id", "n", "extra"}),
        (6001, {"id", "n", "extra"}),
        (8001, {"id", "m", "extra"}),
    ):
        assert rows[key] == names
    assert rows[10_001] == rows[10_002] == {"id", "m", "extra"}
    assert source.mirrored("t") == source.actual("t")


def test_X02_a_long_transaction_is_held_in_pieces_not_in_memory(source: TransactionSource) -> None:
    with source.capture() as capture, source.database.connect() as a:
        a.execute(FILL.format(1, 50_000))
        wait_for(
            lambda: bool(source.open_files) or source.kinds["I"] > 40_000,
            "rows on their way before the commit",
        )
        a.commit()
        source.catch_up(capture)
    assert source.kinds["S"] > 50
    assert WatchedDecoder.largest_piece <= PIECE_MESSAGES
    assert WatchedDecoder.most_carried == 0
    assert [row["id"] for row in source.changes("t")] == list(range(1, 50_001))
    assert sum(1 for segment in SpoolReader(source.spool).segments() if segment.rows) == 1
    assert source.left_over == []


def test_X02_a_long_transaction_that_is_rolled_back_at_its_end_leaves_nothing(
    source: TransactionSource,
) -> None:
    with source.capture() as capture, source.database.connect() as a:
        a.execute(FILL.format(1, 50_000))
        wait_for(lambda: source.kinds["I"] > 40_000, "most rows received before the end")
        a.rollback()
        source.database.execute(FILL.format(1, 1))
        source.catch_up(capture)
        wait_for(lambda: not source.left_over, "an empty open/")
    assert source.kinds["A"] == 1
    assert [row["id"] for row in source.changes("t")] == [1]


@pytest.mark.versions(14, 18)
def test_H02_the_slot_moves_on_while_a_transaction_is_open_and_a_restart_still_brings_it_whole(
    source: TransactionSource,
) -> None:
    with source.database.connect() as a:
        with source.capture() as capture:
            a.execute(FILL.format(1, 3000))
            wait_for(lambda: source.kinds["I"] > 1000, "the open transaction on its way")
            source.database.execute("INSERT INTO public.other SELECT generate_series(1, 5000)")
            source.database.execute(FILL.format(9001, 9002))
            source.catch_up(capture)
            assert [row["id"] for row in source.changes("t")] == [9001, 9002]
            reached = release(source.spool, "pipeline", capture.end or source.confirmed)
            wait_for(lambda: source.confirmed >= reached, "the slot at what was released")
        with source.capture() as capture:
            a.execute(FILL.format(3001, 6000))
            a.commit()
            source.catch_up(capture)
    assert [row["id"] for row in source.changes("t") if row["id"] < 9000] == list(range(1, 6001))
    assert source.left_over == []


def test_X06_L02_a_restart_after_any_kind_of_event_neither_loses_nor_doubles(
    source: TransactionSource,
) -> None:
    send = "SELECT pg_logical_emit_message({}, 'penstock', '{}')"
    with source.database.connect() as a, source.database.connect(autocommit=True) as b:
        events = [
            lambda: a.execute(FILL.format(1, 10)),
            lambda: b.execute(FILL.format(9101, 9110)),
            lambda: b.execute(send.format("false", "loose")),
            lambda: None,
            lambda: a.execute(FILL.format(11, 2000)),
            lambda: b.execute(send.format("true", "of a transaction")),
            lambda: b.execute("INSERT INTO public.other VALUES (1)"),
            lambda: a.execute("SAVEPOINT one"),
            lambda: a.execute(FILL.format(2001, 4000)),
            lambda: a.execute("ROLLBACK TO one"),
            a.commit,
            lambda: b.execute(send.format("false", "last")),
        ]
        for event in events:
            with source.capture(prefixes=("penstock",)) as capture:
                event()
                source.catch_up(capture)
    assert source.mirrored("t") == source.actual("t")
    assert [message.content for message in source.messages()] == [b"loose", b"of a transaction", b"last"]


@pytest.mark.versions(14, 18)
def test_X01_rolled_back_and_empty_transactions_leave_no_row(source: TransactionSource) -> None:
    with source.capture() as capture, source.database.connect() as a:
        a.execute(FILL.format(1, 5))
        a.rollback()
        a.execute("SAVEPOINT one")
        a.execute(FILL.format(1, 5))
        a.execute("ROLLBACK TO one")
        a.commit()
        a.execute("SELECT txid_current()")
        a.commit()
        a.execute("INSERT INTO public.other SELECT generate_series(1, 5000)")
        a.commit()
        source.catch_up(capture)
        assert [segment for segment in SpoolReader(source.spool).segments() if segment.files] == []


def test_X05_changes_are_ordered_by_commit_not_by_xid(source: TransactionSource) -> None:
    with source.capture() as capture, source.database.connect() as a, source.database.connect() as b:
        a.execute(FILL.format(1, 1))
        b.execute(FILL.format(2, 2))
        b.commit()
        a.commit()
        source.catch_up(capture)
    first, second = source.changes("t")
    assert (first["id"], second["id"]) == (2, 1)
    assert first["_xid"] > second["_xid"]
    assert first["_commit_version"] < second["_commit_version"]


def test_X08_a_transaction_from_elsewhere_is_captured_and_its_origin_stays_with_it(
    source: TransactionSource,
) -> None:
    name = f"elsewhere_{source.database.name}"
    with source.capture() as capture, source.database.connect(autocommit=True) as a:
        a.execute("SELECT pg_replication_origin_create(%s)", [name])
        a.execute("SELECT pg_replication_origin_session_setup(%s)", [name])
        for low, high in ((1, 3), (101, 2000)):
            with a.transaction():
                a.execute("SELECT pg_replication_origin_xact_setup('0/1', now())")
                a.execute(FILL.format(low, high))
        a.execute("SELECT pg_replication_origin_session_reset()")
        a.execute(FILL.format(4, 6))
        source.catch_up(capture)
        a.execute("SELECT pg_replication_origin_drop(%s)", [name])
    assert source.kinds["O"] == 2
    assert source.kinds["S"] > 0
    assert source.mirrored("t") == source.actual("t")


def test_X09_a_commit_that_did_not_wait_for_the_disk_is_captured_with_its_time(
    source: TransactionSource,
) -> None:
    with source.capture() as capture, source.database.connect(autocommit=True) as a:
        a.execute("SET synchronous_commit = off")
        a.execute(FILL.format(1, 3))
        a.execute(FILL.format(4, 4000))
        a.execute("SET synchronous_commit = on")
        a.execute(FILL.format(4001, 4001))
        source.catch_up(capture)
    times: dict[int, datetime] = dict(
        source.database.query("SELECT id, pg_xact_commit_timestamp(xmin) FROM public.t")
    )
    assert {row["id"]: row["_commit_timestamp"] for row in source.changes("t")} == times
