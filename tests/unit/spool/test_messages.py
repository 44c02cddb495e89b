"""Logical messages in the spool: each in one segment, whatever is sealed when and whatever is sent again
after a restart.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.change import Idle, LogicalMessage, PiecesAborted, TransactionPiece, Transactions
from penstock.position import Lsn
from penstock.spool import SpoolReader, SpoolWriter
from penstock.spool import open_transactions as pieces
from penstock.spool import writer as buffer
from tests.support.spool.builders import ORDERS, Commit, at, committed, piece, time_of, transactions


def loose(lsn: int) -> LogicalMessage:
    return LogicalMessage("penstock", b"\0\xff", Lsn(lsn))


def of_transaction(position: int, lsn: int, xid: int = 7) -> LogicalMessage:
    return LogicalMessage("penstock", b"renamed", Lsn(lsn), xid, 3, at(position))


def read(root: Path, start: int, end: int) -> tuple[LogicalMessage, ...]:
    return SpoolReader(root).read(at(start), at(end)).messages


def test_X07_messages_are_in_the_manifest_in_log_order(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(loose(12))
    writer.append(
        replace(transactions(Commit(10), Commit(20)), messages=(of_transaction(10, 2), of_transaction(20, 1)))
    )
    sealed = writer.seal()
    assert sealed is not None
    assert sealed.messages == (of_transaction(10, 2), loose(12), of_transaction(20, 1))
    assert read(tmp_path, 0, 20) == sealed.messages
    assert read(tmp_path, 0, 12) == (of_transaction(10, 2),)
    assert read(tmp_path, 12, 20) == (loose(12), of_transaction(20, 1))


def test_X07_a_transaction_of_messages_alone_is_sealed_like_rows(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(Transactions((), at(10), time_of(10), 1, (of_transaction(10, 2),)))
    assert writer.pending_rows == 1
    sealed = writer.seal()
    assert sealed is not None
    assert (sealed.messages, sealed.files) == ((of_transaction(10, 2),), ())


def test_X07_a_message_at_the_end_of_a_segment_belongs_to_the_next_which_the_server_would_send_again(
    tmp_path: Path,
) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(loose(10))
    writer.append(Idle(at(10)))
    assert writer.seal(quiet=True) is not None
    assert read(tmp_path, 0, 10) == ()
    writer.append(Idle(at(20)))
    writer.seal(quiet=True)
    assert read(tmp_path, 0, 20) == (loose(10),)


def test_X07_a_message_that_is_sent_again_after_a_restart_is_held_once(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(loose(5))
    writer.append(transactions(Commit(10)))
    writer.append(loose(12))
    writer.seal()
    writer.close()
    writer = SpoolWriter(tmp_path, at(10))
    for again in (loose(5), loose(12)):
        writer.append(again)
    writer.append(transactions(Commit(20)))
    writer.seal()
    assert [segment.messages for segment in SpoolReader(tmp_path).segments()] == [(loose(5),), (loose(12),)]
    assert read(tmp_path, 0, 20) == (loose(5), loose(12))


def test_X07_messages_of_pieces_count_at_the_commit_without_those_rolled_back(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, at(0))
    writer.append(loose(3))
    writer.append(TransactionPiece(7, (), (replace(of_transaction(1, 2, xid=8), position=None),)))
    writer.append(TransactionPiece(7, (), (replace(of_transaction(1, 4, xid=9), position=None),)))
    writer.append(piece(7, (ORDERS, 0)))
    writer.append(PiecesAborted(7, 9))
    (sealed,) = writer.append(committed(7, 20))
    assert sealed.messages == (loose(3), of_transaction(20, 2, xid=7))


def test_X07_messages_beyond_the_memory_limit_are_dropped_and_an_empty_one_marks_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pieces, "MAX_MESSAGE_BYTES", 2_000)
    writer = SpoolWriter(tmp_path, at(0))
    large = replace(of_transaction(1, 2), content=b"x" * 900, position=None)
    writer.append(TransactionPiece(7, (), (large,)))
    writer.append(PiecesAborted(7, 7))
    writer.append(TransactionPiece(8, (), (large,)))
    writer.append(TransactionPiece(9, (), (large,) * 3))
    writer.append(committed(9, 20))
    writer.append(committed(8, 30))
    writer.seal()
    assert [(each.content, each.xid, each.position) for each in read(tmp_path, 0, 20)] == [(b"", 9, at(20))]
    assert [each.content for each in read(tmp_path, 20, 30)] == [large.content]
    assert [record.message for record in caplog.records] == ["logical messages dropped"]


def test_X07_messages_outside_of_transactions_beyond_the_memory_limit_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer, "MAX_PENDING_MESSAGE_BYTES", 2_000)
    writer = SpoolWriter(tmp_path, at(0))
    for place in range(3, 9):
        writer.append(replace(loose(place), content=b"x" * 700))
    writer.append(transactions(Commit(10)))
    writer.seal()
    assert [each.lsn for each in read(tmp_path, 0, 10)] == [Lsn(3), Lsn(4)]
    writer.append(loose(12))
    writer.append(transactions(Commit(20)))
    writer.seal()
    assert read(tmp_path, 10, 20) == (loose(12),)
