"""Protocol version 2, message by message: streamed transactions. Random streams are in tests/property."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from penstock.change import (
    Idle,
    LogicalMessage,
    LogStep,
    PiecesAborted,
    PiecesCommitted,
    TransactionPiece,
    Transactions,
)
from penstock.errors import ProtocolError, Recovery, SlotTwoPhaseError
from penstock.position import Lsn, Position
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from penstock.postgres.types.registry import TypeResolver
from tests.support.pgoutput_builder import (
    Table,
    TableColumn,
    begin,
    commit,
    insert,
    keepalive,
    message,
    origin,
    relation,
    stream_abort,
    stream_commit,
    stream_start,
    stream_stop,
    streamed,
    truncate,
    type_name,
    update,
    wal_data,
)

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
ID = TableColumn("id", 23, is_key=True)
ITEMS = Table(7, "items", (ID, TableColumn("name")))
WIDER = Table(7, "items", (ID, TableColumn("name"), TableColumn("extra")))
NARROW = Table(7, "items", (ID,))


def block(xid: int, *messages: tuple[int, bytes], is_first: bool = True) -> list[bytes]:
    """A block of the transaction `xid`; each message with the xid of its subtransaction."""
    return [
        stream_start(xid, is_first=is_first),
        *(streamed(each, owner) for owner, each in messages),
        stream_stop(),
    ]


def row(at: int, *rest: bytes) -> bytes:
    return insert(7, [b"%d" % at, *(rest or (b"x",))])


def rows(steps: list[LogStep]) -> list[tuple[Any, ...]]:
    """Each row of the pieces and transactions as (xid of the step, own xid, ordinal, own values…)."""
    found: list[tuple[Any, ...]] = []
    for step in steps:
        if isinstance(step, Transactions | TransactionPiece):
            for batch in step.batches:
                for each in batch.rows.to_pylist():
                    own = [each[name] for name in batch.table.column_names]
                    found.append((getattr(step, "xid", None), each["_xid"], each["_ordinal"], *own))
    return found


def test_X03_a_block_is_a_piece_whose_rows_have_the_xid_of_their_subtransaction() -> None:
    decoder = PgOutputDecoder()
    steps = decoder.decode(
        block(
            5, (5, relation(ITEMS)), (5, row(1)), (6, update(7, [b"2", b"x"], [b"1", None])), (6, truncate(7))
        )
    )
    assert steps[0] == TransactionPiece(5, ())
    assert rows(steps) == [(5, 5, 0, 1, "x"), (5, 6, 1, 1, None), (5, 6, 2, 2, "x"), (5, 6, 3, None, None)]
    assert decoder.carried_messages == 0
    assert decoder.decode([stream_commit(5, 100, NOON)]) == [PiecesCommitted(5, Position.of(100), NOON)]
    with pytest.raises(ProtocolError, match="not open"):
        decoder.decode([stream_commit(5, 110)])


def test_X03_ordinals_go_on_over_blocks_and_other_transactions() -> None:
    messages = [
        *block(5, (5, relation(ITEMS)), (5, row(1))),
        begin(9),
        relation(ITEMS),
        row(10),
        commit(50),
        *block(8, (8, relation(ITEMS)), (8, row(20))),
        *block(5, (6, row(2)), is_first=False),
        stream_commit(8, 60),
        *block(5, (5, row(3)), is_first=False),
        stream_commit(5, 70),
    ]
    for call_size in (1, 3, len(messages)):
        decoder = PgOutputDecoder()
        steps = [
            step
            for low in range(0, len(messages), call_size)
            for step in decoder.decode(messages[low : low + call_size])
        ]
        assert rows(steps) == [
            (5, 5, 0, 1, "x"),
            (None, 9, 0, 10, "x"),
            (8, 8, 0, 20, "x"),
            (5, 6, 1, 2, "x"),
            (5, 5, 2, 3, "x"),
        ]
        assert [step.xid for step in steps if isinstance(step, PiecesCommitted)] == [8, 5]


def test_X03_aborts_of_a_part_and_of_the_whole() -> None:
    decoder = PgOutputDecoder()
    decoder.decode(block(5, (5, relation(ITEMS)), (6, row(1))))
    assert decoder.decode([stream_abort(5, 6)]) == [PiecesAborted(5, 6)]
    assert decoder.decode([stream_abort(5, 5)]) == [PiecesAborted(5, 5)]
    with pytest.raises(ProtocolError, match="not open"):
        decoder.decode([stream_commit(5, 100)])


def test_X05_commits_are_ordered_by_position_whatever_their_xids() -> None:
    messages = [
        begin(2**32 - 1),
        commit(10),
        begin(3),
        commit(20),
        *block(2**32 - 2),
        *block(4),
        stream_commit(4, 30),
        begin(1),
        commit(40),
    ]
    steps = PgOutputDecoder().decode([*messages, stream_commit(2**32 - 2, 50)])
    assert [step.end.value for step in steps if isinstance(step, Transactions | PiecesCommitted)] == [
        20,
        30,
        40,
        50,
    ]


# --- schemas ------------------------------------------------------------------------------------------------


def test_X03_descriptions_in_a_transaction_hold_for_others_only_after_its_commit() -> None:
    decoder = PgOutputDecoder()
    decoder.decode(
        [
            begin(1),
            relation(ITEMS),
            row(1),
            commit(10),
            *block(5, (5, relation(WIDER)), (5, row(2, b"a", b"b"))),
        ]
    )
    assert rows(decoder.decode([begin(2), row(3), commit(20)])) == [(None, 2, 0, 3, "x")]
    decoder.decode([stream_commit(5, 30)])
    assert rows(decoder.decode([begin(3), row(4, b"a", b"b"), commit(40)])) == [(None, 3, 0, 4, "a", "b")]


@pytest.mark.parametrize("subxid", [5, 6])
def test_X03_descriptions_in_a_transaction_are_forgotten_when_it_or_a_part_of_it_is_rolled_back(
    subxid: int,
) -> None:
    decoder = PgOutputDecoder()
    decoder.decode(
        [
            begin(1),
            relation(ITEMS),
            commit(10),
            *block(5, (6, relation(WIDER)), (6, row(2, b"a", b"b"))),
            stream_abort(5, subxid),
        ]
    )
    assert rows(decoder.decode([begin(2), row(3), commit(20)])) == [(None, 2, 0, 3, "x")]
    if subxid == 6:
        with pytest.raises(ProtocolError, match="no Relation"):
            decoder.decode(block(5, (5, row(4)), is_first=False))


def test_X03_a_table_described_to_all_after_the_open_transaction_keeps_that_shape() -> None:
    decoder = PgOutputDecoder()
    # A column list of the publication may change without a lock on the table.
    decoder.decode(
        [
            *block(5, (5, relation(ITEMS)), (5, row(1))),
            begin(2),
            relation(NARROW),
            insert(7, [b"2"]),
            commit(20),
        ]
    )
    decoder.decode([stream_commit(5, 30)])
    assert rows(decoder.decode([begin(3), insert(7, [b"4"]), commit(40)])) == [(None, 3, 0, 4)]


def test_type_messages_reach_the_resolver_before_the_relation_that_needs_them() -> None:
    heard: list[object] = []

    class Listening(TypeResolver):
        def learn(self, oid: int, namespace: str, name: str) -> None:
            heard.append((oid, namespace, name))

    decoder = PgOutputDecoder(types=Listening())
    decoder.decode(
        [
            begin(1),
            type_name(20_000, "mood"),
            relation(ITEMS),
            commit(10),
            *block(5, (5, type_name(20_001, "x", ""))),
        ]
    )
    assert heard == [(20_000, "public", "mood"), (20_001, "pg_catalog", "x")]


# --- quiet, messages, origins -------------------------------------------------------------------------------


def test_H02_the_log_is_quiet_between_blocks_though_a_transaction_is_open() -> None:
    decoder = PgOutputDecoder()
    assert decoder.decode([*block(5, (5, relation(ITEMS))), keepalive(50)])[-1] == Idle(Position.of(50))
    assert decoder.decode([stream_start(5, is_first=False), keepalive(60)]) == []
    assert decoder.decode([stream_stop(), stream_commit(5, 100), keepalive(90)])[-1:] == [
        PiecesCommitted(5, Position.of(100), datetime(2000, 1, 1, tzinfo=UTC))
    ]


def test_X07_messages_are_given_out_by_prefix_in_their_place() -> None:
    decoder = PgOutputDecoder(prefixes=frozenset({"mine"}))
    steps = decoder.decode(
        [
            message("mine", b"loose", 5, transactional=False),
            message("other", b"", 6, transactional=False),
            begin(1),
            relation(ITEMS),
            row(1),
            update(7, [b"1", b"y"], [b"1", None]),
            message("mine", b"in", 7, transactional=True),
            message("other", b"", 8, transactional=True),
            commit(100),
            *block(
                5, (5, relation(ITEMS)), (5, row(2)), (6, message("mine", b"open", 9, transactional=True))
            ),
        ]
    )
    loose, whole, _, piece = steps
    assert loose == LogicalMessage("mine", b"loose", Lsn(5))
    assert isinstance(whole, Transactions)
    assert whole.messages == (LogicalMessage("mine", b"in", Lsn(7), 1, 3, Position.of(100)),)
    assert isinstance(piece, TransactionPiece)
    assert piece.messages == (LogicalMessage("mine", b"open", Lsn(9), 6, 1),)


def test_X08_an_origin_stays_with_its_transaction_and_changes_nothing() -> None:
    messages = [
        begin(1),
        origin("elsewhere"),
        relation(ITEMS),
        row(1),
        commit(10),
        begin(2),
        row(2),
        commit(20),
    ]
    in_block = [
        stream_start(5),
        origin("elsewhere"),
        streamed(relation(ITEMS), 5),
        streamed(row(3), 5),
        stream_stop(),
    ]
    assert [each[-2] for each in rows(PgOutputDecoder().decode([*messages, *in_block]))] == [1, 2, 3]


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [stream_stop()],
        [stream_start(5), stream_start(6)],
        [stream_start(5), begin(1)],
        [stream_start(5), commit(10)],
        [stream_start(5), stream_commit(5, 10)],
        [stream_start(5), stream_abort(5, 5)],
        [begin(1), stream_start(5)],
        [begin(1), stream_commit(5, 10)],
        [begin(1), stream_stop()],
        [stream_commit(5, 10)],
        [stream_abort(5, 5)],
        [stream_start(5, is_first=False)],
        [*block(5), stream_start(5)],
        [*block(5), stream_commit(5, 10), stream_commit(5, 20)],
        [*block(5), stream_commit(5, 10), begin(1), commit(10)],
        [begin(1), commit(10), *block(5), stream_commit(5, 10)],
        [*block(5), stream_commit(5, 10) + b"\0"],
        [*block(5), stream_abort(5, 5)[:-1]],
        [stream_start(5) + b"\0"],
        [stream_start(5), stream_stop() + b"\0"],
        [streamed(row(1), 5)],
        [stream_start(5), row(1)],
        [begin(1), relation(ITEMS), commit(10), *block(5, (5, row(1)))],
    ],
)
def test_X03_anything_but_the_protocol_is_refused(messages: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        PgOutputDecoder().decode(messages)


@pytest.mark.parametrize("kind", [b"b", b"P", b"K", b"r", b"p"])
def test_X04_a_slot_that_sends_prepared_transactions_is_refused_by_name(kind: bytes) -> None:
    with pytest.raises(SlotTwoPhaseError, match="two_phase") as caught:
        PgOutputDecoder().decode([wal_data(kind + b"\0" * 30)])
    assert caught.value.recovery is Recovery.OPERATOR
    assert caught.value.hint


@pytest.mark.parametrize(
    "messages",
    [
        [message("mine", b"", 5, transactional=True)],
        [begin(1), message("mine", b"", 5, transactional=False)],
        block(5, (5, message("mine", b"", 5, transactional=False))),
    ],
)
def test_X07_a_message_on_the_wrong_side_of_its_transaction_is_refused(messages: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        PgOutputDecoder(prefixes=frozenset({"mine"})).decode(messages)
