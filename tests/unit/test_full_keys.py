"""The key under replica identity FULL: the catalog's, but not before the log has come to it."""

from __future__ import annotations

import pytest

from penstock.change import LogStep, TransactionPiece, Transactions
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from penstock.postgres.pgoutput.keys import CatalogKey, FullKeys
from tests.pgoutput_builder import (
    Table,
    TableColumn,
    begin,
    commit,
    insert,
    relation,
    stream_commit,
    stream_start,
    stream_stop,
    streamed,
    update,
)

TABLE = 8
COLUMNS = ("a", "b", "c")
FULL = Table(TABLE, "t", tuple(TableColumn(name, is_key=True) for name in COLUMNS), "f")


class Catalog:
    """The catalog of now, as a test sets it."""

    def __init__(self, columns: tuple[str, ...] = (), xid: int | None = None) -> None:
        self.now: CatalogKey | None = CatalogKey(columns, xid)
        self.asked = 0

    def load(self, oid: int) -> CatalogKey | None:
        assert oid == TABLE
        self.asked += 1
        return self.now


def test_the_first_answer_is_taken_as_it_is() -> None:
    keys = FullKeys({}, Catalog(("a",), 50).load)
    assert keys.key(TABLE, COLUMNS, 10) == ("a",)


def test_a_key_stands_in_table_order() -> None:
    assert FullKeys({}, Catalog(("c", "a"), 5).load).key(TABLE, COLUMNS, 10) == ("a", "c")


@pytest.mark.parametrize(("made", "reading", "key"), [(50, 49, ("a",)), (50, 50, ("b",)), (50, 51, ("b",)), (3, (1 << 32) - 3, ("a",))])
def test_S06_a_key_from_the_future_waits_for_its_transaction(made: int, reading: int, key: tuple[str, ...]) -> None:
    keys = FullKeys({TABLE: ("a",)}, Catalog(("b",), made).load)
    assert keys.key(TABLE, COLUMNS, reading) == key
    assert keys.ripe(reading) == []
    if key == ("a",):
        assert keys.ripe(made) == [TABLE]
        assert keys.settle(TABLE, COLUMNS) == ("b",)
        assert keys.ripe(made) == []


def test_S06_the_key_of_a_table_that_is_gone_by_now_is_the_last_one_known() -> None:
    catalog = Catalog()
    catalog.now = None
    assert FullKeys({TABLE: ("a",)}, catalog.load).key(TABLE, COLUMNS, 10) == ("a",)


def test_S03_a_key_of_columns_that_the_table_does_not_have_yet_is_not_taken() -> None:
    assert FullKeys({TABLE: ("a",)}, Catalog(("renamed",), 5).load).key(TABLE, COLUMNS, 10) == ("a",)
    assert FullKeys({TABLE: ("gone",)}, Catalog(("renamed",), 5).load).key(TABLE, COLUMNS, 10) == ()


def test_S09_a_key_that_was_dropped_is_no_key_any_more() -> None:
    assert FullKeys({TABLE: ("a",)}, Catalog().load).key(TABLE, COLUMNS, 10) == ()


def key_of(step: LogStep) -> tuple[str, ...]:
    assert isinstance(step, Transactions | TransactionPiece)
    return step.batches[-1].table.key


def test_S09_the_catalog_is_asked_again_when_a_table_is_described_again() -> None:
    catalog = Catalog(("a",), 1)
    decoder = PgOutputDecoder(load_key=catalog.load)
    row = insert(TABLE, [b"1", b"2", b"3"])
    (first,) = decoder.decode([begin(10), relation(FULL), row, commit(100)])
    (second,) = decoder.decode([begin(11), row, commit(200)])
    catalog.now = CatalogKey(("b",), 12)
    (third,) = decoder.decode([begin(13), relation(FULL), row, commit(300)])
    assert [key_of(step) for step in (first, second, third)] == [("a",), ("a",), ("b",)]
    assert catalog.asked == 2, "only a description asks"


def test_S09_a_key_made_by_part_of_the_transaction_that_is_being_read_holds_from_the_next_one_on() -> None:
    catalog = Catalog(("a",), 1)
    decoder = PgOutputDecoder(load_key=catalog.load)
    row = insert(TABLE, [b"1", b"2", b"3"])
    (first,) = decoder.decode([begin(10), relation(FULL), row, commit(100)])
    catalog.now = CatalogKey(("b",), 21)
    (second,) = decoder.decode([begin(20), relation(FULL), row, commit(200)])
    (third,) = decoder.decode([begin(22), row, commit(300)])
    assert [key_of(step) for step in (first, second, third)] == [("a",), ("a",), ("b",)]


def test_S09_a_key_made_in_an_open_transaction_holds_once_it_has_committed() -> None:
    catalog = Catalog(("a",), 1)
    decoder = PgOutputDecoder(load_key=catalog.load)
    row = insert(TABLE, [b"1", b"2", b"3"])
    changed = update(TABLE, [b"1", b"2", b"4"], [b"1", b"2", b"3"], b"O")
    opened = decoder.decode([stream_start(20), streamed(relation(FULL), 20), streamed(row, 20), stream_stop()])
    assert key_of(opened[-1]) == ("a",)
    catalog.now = CatalogKey(("b",), 20)
    decoder.decode([stream_commit(20, 100)])
    (after,) = decoder.decode([begin(21), row, changed, commit(200)])
    assert key_of(after) == ("b",)
