"""The output of the decoder, message by message; random streams are in tests/property."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from penstock.change import Idle, LogStep, PiecesCommitted, TransactionPiece, Transactions
from penstock.errors import ProtocolError
from penstock.position import Position
from penstock.postgres.pgoutput import decoder as decoder_module
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from tests.support.pgoutput_builder import (
    Absent,
    Table,
    TableColumn,
    begin,
    commit,
    delete,
    insert,
    keepalive,
    other,
    relation,
    stream_abort,
    truncate,
    update,
    wal_data,
)

UNCHANGED = Absent.UNCHANGED
NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
ID = TableColumn("id", 23, is_key=True)
ITEMS = Table(7, "items", (ID, TableColumn("name"), TableColumn("body")))
FULL = Table(8, "full", (TableColumn("id", 23), TableColumn("name"), TableColumn("body")), identity="f")


def rows(step: LogStep) -> list[tuple[Any, ...]]:
    """Each row as (change type, ordinal, own values…, unchanged)."""
    assert isinstance(step, Transactions | TransactionPiece)
    found: list[tuple[Any, ...]] = []
    for batch in step.batches:
        for row in batch.rows.to_pylist():
            own = [row[name] for name in batch.table.column_names]
            found.append((row["_change_type"], row["_ordinal"], *own, row["_unchanged"]))
    return found


def decode_changes(
    table: Table, *changes: bytes, keys: dict[int, tuple[str, ...]] | None = None
) -> Transactions:
    (step,) = PgOutputDecoder(keys).decode([begin(1), relation(table), *changes, commit(100)])
    assert isinstance(step, Transactions)
    return step


def test_position_time_and_xid_come_from_commit_and_begin() -> None:
    (step,) = PgOutputDecoder().decode(
        [begin(5, 90), relation(ITEMS), insert(7, [b"1", b"a", None]), commit(100, NOON)]
    )
    assert isinstance(step, Transactions)
    assert (step.end, step.commit_time, step.count) == (Position.of(100), NOON, 1)
    (row,) = step.batches[0].rows.to_pylist()
    assert (row["_commit_version"], row["_commit_timestamp"], row["_xid"]) == (100, NOON, 5)


def test_R01_a_delete_shows_its_key_alone() -> None:
    step = decode_changes(ITEMS, delete(7, [b"1", None, None]))
    assert rows(step) == [("delete", 0, 1, None, None, None)]


def test_R02_under_full_identity_the_key_is_the_catalogs() -> None:
    gone = delete(8, [b"1", b"a", b"x"], b"O")
    assert rows(decode_changes(FULL, gone, keys={8: ("id",)})) == [("delete", 0, 1, None, None, None)]
    assert rows(decode_changes(FULL, gone)) == [("delete", 0, 1, "a", "x", None)]


def test_R05_without_a_key_an_update_is_the_old_row_out_and_the_new_row_in() -> None:
    same = [b"1", b"a", b"big"]
    step = decode_changes(FULL, update(8, [b"1", b"b", UNCHANGED], same, b"O"), update(8, same, same, b"O"))
    assert rows(step) == [
        ("delete", 0, 1, "a", "big", None),
        ("insert", 1, 1, "b", "big", None),
        ("delete", 2, 1, "a", "big", None),
        ("insert", 3, 1, "a", "big", None),
    ]
    assert (step.batches[0].counts.moves, step.batches[0].counts.updates) == (2, 0)


def test_R06_a_key_change_is_a_delete_and_an_insert_with_the_toast_filled() -> None:
    table = Table(
        7, "t", (TableColumn("id", 23, is_key=True), TableColumn("name", is_key=True), TableColumn("body"))
    )
    step = decode_changes(
        table, update(7, [b"2", UNCHANGED, b"x"], [b"1", b"long", None]), insert(7, [b"3", b"", None])
    )
    assert rows(step) == [
        ("delete", 0, 1, "long", None, None),
        ("insert", 1, 2, "long", "x", None),
        ("insert", 2, 3, "", None, None),
    ]
    assert step.batches[0].counts.moves == 1


def test_R07_an_unchanged_toast_value_is_named_and_not_just_null() -> None:
    step = decode_changes(ITEMS, update(7, [b"1", None, UNCHANGED]), update(7, [b"1", b"a", b"b"]))
    assert rows(step) == [
        ("update_postimage", 0, 1, None, None, ["body"]),
        ("update_postimage", 1, 1, "a", "b", None),
    ]
    assert step.batches[0].counts.unchanged == 1


def test_R08_under_full_identity_the_old_row_gives_the_toast_value() -> None:
    step = decode_changes(
        FULL, update(8, [b"1", b"new", UNCHANGED], [b"1", b"old", b"big"], b"O"), keys={8: ("id",)}
    )
    assert rows(step) == [("update_postimage", 1, 1, "new", "big", None)]


def test_R12_truncate_is_a_row_of_every_table_in_its_place() -> None:
    step = decode_changes(
        ITEMS, relation(FULL), insert(7, [b"1", None, None]), truncate(8, 7), insert(7, [b"2", None, None])
    )
    assert sorted(rows(step), key=lambda row: row[1]) == [
        ("insert", 0, 1, None, None, None),
        ("truncate", 1, None, None, None, None),
        ("truncate", 2, None, None, None, None),
        ("insert", 3, 2, None, None, None),
    ]


def test_R15_a_table_without_columns_still_has_rows() -> None:
    step = decode_changes(Table(9, "bare", ()), insert(9, []), insert(9, []))
    assert step.batches[0].rows.num_rows == 2


def test_S05_each_row_is_decoded_under_the_schema_of_its_place_in_the_log() -> None:
    narrow = Table(7, "items", (ID,))
    first, second, third = decode_changes(
        ITEMS,
        insert(7, [b"1", b"a", b"b"]),
        relation(narrow),
        insert(7, [b"2"]),
        relation(ITEMS),
        insert(7, [b"3", b"c", b"d"]),
    ).batches
    assert [batch.table.column_names for batch in (first, second, third)] == [
        ("id", "name", "body"),
        ("id",),
        ("id", "name", "body"),
    ]
    assert [batch.rows["_ordinal"].to_pylist() for batch in (first, second, third)] == [[0], [1], [2]]


def test_an_open_transaction_waits_for_its_commit() -> None:
    decoder = PgOutputDecoder()
    opening = [begin(1), relation(ITEMS), insert(7, [b"1", None, None])]
    assert decoder.decode(opening) == []
    assert decoder.carried_bytes == sum(map(len, opening))
    (step,) = decoder.decode([commit(100), begin(2)])
    assert rows(step) == [("insert", 0, 1, None, None, None)]
    assert decoder.carried_messages == 1


def test_X01_an_empty_transaction_moves_the_position() -> None:
    assert PgOutputDecoder().decode([begin(1), commit(100, NOON)]) == [
        Transactions((), Position.of(100), NOON, 1)
    ]


@pytest.mark.parametrize(
    "decoder", [PgOutputDecoder(max_open_messages=2), PgOutputDecoder(max_open_bytes=150)]
)
def test_X02_a_long_transaction_is_sent_in_pieces_with_consecutive_ordinals(decoder: PgOutputDecoder) -> None:
    opened, first = decoder.decode(
        [begin(5), relation(ITEMS), insert(7, [b"1", None, None]), insert(7, [b"2", None, None])]
    )
    assert opened == TransactionPiece(5, ())
    assert isinstance(first, TransactionPiece)
    assert first.xid == 5
    assert first.batches[0].rows["_commit_version"].null_count == 2
    assert decoder.carried_bytes == 0
    last, done, following = decoder.decode(
        [insert(7, [b"3", None, None]), commit(100, NOON), begin(6), commit(200, NOON)]
    )
    assert [row[1:3] for step in (first, last) for row in rows(step)] == [(0, 1), (1, 2), (2, 3)]
    assert done == PiecesCommitted(5, Position.of(100), NOON)
    assert following == Transactions((), Position.of(200), NOON, 1)


def test_H02_a_keepalive_tells_a_quiet_place_only_when_nothing_is_open() -> None:
    decoder = PgOutputDecoder()
    assert decoder.decode([keepalive(50), keepalive(60)]) == [Idle(Position.of(60))]
    assert decoder.decode([keepalive(70), begin(1)]) == []
    assert decoder.decode([keepalive(900)]) == []
    assert [type(step) for step in decoder.decode([keepalive(900), commit(100)])] == [Transactions]
    assert decoder.decode([keepalive(99)]) == []
    assert decoder.decode([other(b"M", b"\0"), keepalive(100)]) == [Idle(Position.of(100))]


def test_many_gigabytes_in_a_call_are_decoded_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "RUN_BYTES", 100)
    messages = [
        begin(1),
        relation(ITEMS),
        *(insert(7, [b"%d" % at, b"x" * 200, None]) for at in range(5)),
        commit(100),
        keepalive(100),
    ]
    steps = PgOutputDecoder().decode(messages)
    assert [type(step) for step in steps] == [Transactions, Idle]
    assert [row[2] for row in rows(steps[0])] == [0, 1, 2, 3, 4]


SOUND = [begin(1), relation(ITEMS)]
SECRET = b"hunter2"


@pytest.mark.parametrize(
    "messages",
    [
        [b""],
        [b"x" * 30],
        [wal_data(b"")],
        [wal_data(b"?")],
        [b"k" + b"\0" * 16],
        [commit(100)],
        [begin(1), begin(2), commit(100)],
        [relation(ITEMS)],
        [insert(7, [SECRET])],
        [begin(1), insert(7, [SECRET]), commit(100)],
        [begin(1), truncate(7), commit(100)],
        [*SOUND, insert(7, [b"1", SECRET]), commit(100)],
        [*SOUND, insert(7, [b"1", SECRET, None])[:-1], commit(100)],
        [*SOUND, insert(7, [b"1", SECRET, None]) + b"n", commit(100)],
        [*SOUND, insert(7, [b"1", None, None])[:-2] + b"b\0\0\0\1x", commit(100)],
        [*SOUND, insert(7, [b"1", None, None])[:-2] + b"t\xff\xff\xff\xfan", commit(100)],
        [*SOUND, update(7, [b"1", None], [b"1", None, None]), commit(100)],
        [*SOUND, update(7, [b"1", None, None], [b"1", None, None], b"X"), commit(100)],
        [*SOUND, delete(7, [b"1", None, None], b"N"), commit(100)],
        [begin(1), relation(ITEMS)[:-1], commit(100)],
        [begin(1), relation(Table(7, "t", (ID, ID))), commit(100)],
        [begin(1), commit(100) + b"\0"],
        [begin(1), commit(1 << 63)],
        [begin(1), commit(100), begin(2), commit(100)],
        [begin(1), commit(100), begin(2), commit(1 << 63)],
    ],
)
def test_anything_but_the_protocol_is_refused_without_showing_a_value(messages: list[bytes]) -> None:
    with pytest.raises(ProtocolError) as caught:
        PgOutputDecoder().decode(messages)
    assert SECRET.decode() not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_error_names_the_kind_of_message_and_its_place() -> None:
    message = wal_data(b"?", lsn=0x16B3748)
    with pytest.raises(ProtocolError, match=r"message '\?' at 0/16B3748: is of an unknown kind"):
        PgOutputDecoder().decode([message])


@pytest.mark.parametrize("bad", [0, 1, 6, 7])
def test_a_value_that_its_type_refuses_is_marked_in_its_row_and_stops_no_other(bad: int) -> None:
    changes = [insert(7, [b"x" if at == bad else b"1", b"a", None]) for at in range(8)]
    (step,) = PgOutputDecoder().decode([begin(1), relation(ITEMS), *changes, commit(100)])
    assert isinstance(step, Transactions)
    (batch,) = step.batches
    assert batch.counts.unreadable == 1
    assert batch.rows.column("id").to_pylist() == [None if at == bad else 1 for at in range(8)]
    assert batch.rows.column("_exact").to_pylist() == [
        [("id", "\ufffdx")] if at == bad else None for at in range(8)
    ]


def test_a_name_that_is_not_utf8_is_escaped_and_stays_distinct() -> None:
    table = Table(7, "caf\udce9", (ID, TableColumn("\udcff"), TableColumn("\\xff")))
    (step,) = PgOutputDecoder().decode(
        [begin(1), relation(table), insert(7, [b"1", b"a", b"b"]), commit(100)]
    )
    assert isinstance(step, Transactions)
    (batch,) = step.batches
    assert (batch.table.name.name, batch.table.column_names) == ("caf\\xe9", ("id", "\\xff", "\\xff\\"))


def test_X03_the_end_of_a_part_of_a_transaction_that_was_never_sent_is_passed_over() -> None:
    assert PgOutputDecoder().decode([stream_abort(20, 21), stream_abort(20, 22)]) == []
    with pytest.raises(ProtocolError, match="not open"):
        PgOutputDecoder().decode([stream_abort(20, 20)])


CODED = Table(
    9,
    "coded",
    (TableColumn("id", 23), TableColumn("code", 25, is_key=True), TableColumn("ts", 23, is_key=True)),
    identity="i",
)
"""A partitioned table whose root is identified by (code, ts)."""


@pytest.mark.parametrize(
    ("table", "change", "keys", "shown", "named"),
    [
        (CODED, delete(9, [b"1", None, None]), {}, (None, None, None), ["code", "ts"]),
        (CODED, update(9, [b"2", b"a", b"5"], [b"1", None, None]), {}, (None, None, None), ["code", "ts"]),
        (CODED, delete(9, [None, b"a", None]), {}, (None, "a", None), ["ts"]),
        (CODED, delete(9, [b"1", b"a", None], b"O"), {}, (None, "a", None), ["ts"]),
        (FULL, delete(8, [b"1", None, None]), {}, (1, None, None), ["name", "body"]),
        (FULL, update(8, [b"2", b"b", b"x"], [b"1", None, None]), {}, (1, None, None), ["name", "body"]),
    ],
)
def test_an_incomplete_old_key_counts_as_unidentified_and_names_the_missing_columns(
    table: Table, change: bytes, keys: dict[int, tuple[str, ...]], shown: tuple[Any, ...], named: list[str]
) -> None:
    step = decode_changes(table, change, keys=keys)
    first = rows(step)[0]
    assert (first[0], first[2:-1], first[-1]) == ("delete", shown, named)
    assert sum(batch.counts.unidentified for batch in step.batches) == 1


def test_an_update_whose_key_is_neither_in_the_new_row_nor_in_the_old_key_is_unidentified() -> None:
    (batch,) = decode_changes(CODED, update(9, [b"1", UNCHANGED, b"5"])).batches
    assert (batch.counts.unidentified, batch.counts.unchanged) == (1, 1)


def test_keys_that_travel_whole_are_identified() -> None:
    sound = [
        insert(9, [b"1", b"a", b"5"]),
        update(9, [b"2", b"a", b"5"]),
        update(9, [b"2", b"b", b"5"], [None, b"a", b"5"]),
    ]
    wider = delete(9, [b"2", b"b", b"5"])  # of a partition whose own key holds the root's
    step = decode_changes(CODED, *sound, wider, delete(9, [None, b"b", b"5"], b"O"), truncate(9))
    assert [batch.counts.unidentified for batch in step.batches] == [0]
    assert {row[-1] for row in rows(step)} == {None}
    whole = decode_changes(
        FULL, delete(8, [b"1", None, None], b"O"), update(8, [b"1", None, None], [b"1", b"a", None], b"O")
    )
    assert [batch.counts.unidentified for batch in whole.batches] == [0]


def test_with_old_rows_requested_and_announced_a_delete_without_one_is_unidentified() -> None:
    gone = [delete(8, [b"1", None, None]), delete(8, [b"2", b"b", None], b"O")]
    (step,) = PgOutputDecoder({8: ("id",)}, old_rows=True).decode(
        [begin(1), relation(FULL), *gone, commit(100)]
    )
    assert rows(step) == [("delete", 0, 1, None, None, ["name", "body"]), ("delete", 1, 2, "b", None, None)]
    assert isinstance(step, Transactions)
    assert [batch.counts.unidentified for batch in step.batches] == [1]
    keyed = [begin(1), relation(ITEMS), delete(7, [b"1", None, None]), commit(100)]
    (step,) = PgOutputDecoder(old_rows=True).decode(keyed)
    assert rows(step) == [("delete", 0, 1, None, None, None)], "only the key was announced"
