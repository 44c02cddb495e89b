"""The key under replica identity FULL: the catalog's, but not before the log has reached it."""

from __future__ import annotations

import pytest

from penstock.change import LogStep, PiecesCommitted, TransactionPiece, Transactions
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from penstock.postgres.pgoutput.relations import CatalogKey, FullKeys
from tests.support.pgoutput_builder import (
    Table,
    TableColumn,
    begin,
    commit,
    insert,
    relation,
    stream_abort,
    stream_commit,
    stream_start,
    stream_stop,
    streamed,
    update,
)

TABLE = 8
COLUMNS = ("a", "b", "c")
FULL = Table(TABLE, "t", tuple(TableColumn(name, is_key=True) for name in COLUMNS), "f")


ROW = insert(TABLE, [b"1", b"2", b"3"])


class Catalog:
    """The current catalog, set by the test."""

    def __init__(self, columns: tuple[str, ...] = (), asked_at: int = 0) -> None:
        self.now: CatalogKey | None = CatalogKey(columns, asked_at)
        self.asked = 0

    def load(self, oid: int) -> CatalogKey | None:
        assert oid == TABLE
        self.asked += 1
        return self.now


def test_the_first_answer_is_taken_as_it_is() -> None:
    assert FullKeys({}, Catalog(("a",), 50).load).describe(TABLE, COLUMNS, 10) == (("a",), None)


def test_a_key_is_in_table_order() -> None:
    assert FullKeys({}, Catalog(("c", "a"), 50).load).describe(TABLE, COLUMNS, 10) == (("a", "c"), None)
    assert FullKeys({TABLE: ("a", "c")}, Catalog(("c", "a"), 50).load).describe(TABLE, COLUMNS, 10) == (
        ("a", "c"),
        None,
    )


def test_S06_the_key_known_holds_as_long_as_the_catalog_gives_it() -> None:
    assert FullKeys({TABLE: ("a",)}, Catalog(("a",), 50).load).describe(TABLE, COLUMNS, 10) == (("a",), None)


@pytest.mark.parametrize("known", [("a",), ()])
def test_S06_between_two_keys_there_is_none_until_the_log_has_passed_the_catalog_read(
    known: tuple[str, ...],
) -> None:
    keys = FullKeys({TABLE: known}, Catalog(("b",), 50).load)
    assert keys.describe(TABLE, COLUMNS, 50) == ((), CatalogKey(("b",), 50))
    assert keys.describe(TABLE, COLUMNS, 51) == (("b",), None)


def test_S06_the_same_answer_again_holds_from_where_it_was_first_given() -> None:
    catalog = Catalog(("b",), 50)
    keys = FullKeys({TABLE: ("a",)}, catalog.load)
    keys.describe(TABLE, COLUMNS, 10)
    catalog.now = CatalogKey(("b",), 90)
    assert keys.describe(TABLE, COLUMNS, 20) == ((), CatalogKey(("b",), 50))
    assert keys.describe(TABLE, COLUMNS, 60) == (("b",), None)


def test_S06_a_key_that_is_back_does_not_hold_before_the_log_has_passed_the_one_between() -> None:
    catalog = Catalog(("b",), 50)
    keys = FullKeys({TABLE: ("a",)}, catalog.load)
    keys.describe(TABLE, COLUMNS, 10)
    catalog.now = CatalogKey(("a",), 90)
    assert keys.describe(TABLE, COLUMNS, 60) == ((), CatalogKey(("a",), 90))


def test_S06_the_key_of_a_table_that_is_gone_by_now_is_the_last_one_known() -> None:
    catalog = Catalog()
    catalog.now = None
    assert FullKeys({TABLE: ("a",)}, catalog.load).describe(TABLE, COLUMNS, 10) == (("a",), None)


def test_S06_a_table_that_is_gone_while_its_key_was_changing_has_none() -> None:
    catalog = Catalog(("b",), 50)
    keys = FullKeys({TABLE: ("a",)}, catalog.load)
    keys.describe(TABLE, COLUMNS, 10)
    catalog.now = None
    assert keys.describe(TABLE, COLUMNS, 60) == ((), None)


def test_S03_a_key_of_columns_that_the_table_does_not_have_yet_is_not_taken() -> None:
    for known in ({}, {TABLE: ("a",)}, {TABLE: ("gone",)}):
        keys = FullKeys(known, Catalog(("renamed",), 50).load)
        assert keys.describe(TABLE, COLUMNS, 10).columns == ()
        assert keys.describe(TABLE, ("renamed", "b"), 60) == (("renamed",), None)


def test_S09_a_key_that_was_dropped_is_no_key_any_more() -> None:
    assert FullKeys({TABLE: ("a",)}, Catalog((), 50).load).describe(TABLE, COLUMNS, 10).columns == ()


def keys_of(*steps: LogStep) -> list[tuple[str, ...]]:
    return [
        batch.table.key
        for step in steps
        if isinstance(step, Transactions | TransactionPiece)
        for batch in step.batches
    ]


def test_S09_the_catalog_is_read_again_when_a_table_is_described_again() -> None:
    catalog = Catalog(("a",), 99)
    decoder = PgOutputDecoder(load_key=catalog.load)
    first = decoder.decode([begin(10), relation(FULL), ROW, commit(100)])
    second = decoder.decode([begin(11), ROW, commit(200)])
    catalog.now = CatalogKey(("b",), 299)
    third = decoder.decode([begin(13), relation(FULL), ROW, commit(300)])
    assert keys_of(*first, *second, *third) == [("a",), ("a",), ("b",)]
    assert catalog.asked == 2, "only a description asks"


@pytest.mark.parametrize("together", [True, False])
def test_S09_a_new_key_holds_from_the_first_transaction_that_commits_after_the_catalog_read(
    together: bool,
) -> None:
    decoder = PgOutputDecoder({TABLE: ("a",)}, load_key=Catalog(("b",), 200).load)
    # The xids decrease: they do not show the order of commits.
    messages = [
        [begin(40 - at), *([relation(FULL)] if at == 0 else []), ROW, commit(end)]
        for at, end in enumerate((100, 200, 210, 220))
    ]
    runs = [[message for each in messages for message in each]] if together else messages
    steps = [step for run in runs for step in decoder.decode(run)]
    assert keys_of(*steps) == ([(), ("b",)] if together else [(), (), ("b",), ("b",)])
    assert [
        batch.rows.num_rows for step in steps if isinstance(step, Transactions) for batch in step.batches
    ] == ([2, 2] if together else [1] * 4)


def test_S09_an_open_transaction_has_the_new_key_once_its_own_changes_are_past_the_place() -> None:
    decoder = PgOutputDecoder({TABLE: ("a",)}, load_key=Catalog(("b",), 200).load)

    def block(lsn: int, *before: bytes) -> list[bytes]:
        return [streamed(message, 20) for message in (*before, ROW[:1] + lsn.to_bytes(8, "big") + ROW[9:])]

    steps = decoder.decode([stream_start(20), *block(100, relation(FULL)), stream_stop()])
    # A later transaction that commits first settles the key for itself only.
    steps += decoder.decode([begin(21), relation(FULL), ROW, commit(190), begin(22), ROW, commit(210)])
    steps += decoder.decode(
        [
            stream_start(20, is_first=False),
            *block(150),
            *block(205),
            *block(206),
            stream_stop(),
            stream_commit(20, 300),
        ]
    )
    steps += decoder.decode([begin(23), ROW, commit(400)])
    assert keys_of(*steps) == [(), (), ("b",), (), ("b",), ("b",)]


def test_S09_a_key_made_in_an_open_transaction_holds_once_the_log_is_past_its_commit() -> None:
    catalog = Catalog(("a",), 50)
    decoder = PgOutputDecoder(load_key=catalog.load)
    opened = decoder.decode(
        [stream_start(20), streamed(relation(FULL), 20), streamed(ROW, 20), stream_stop()]
    )
    catalog.now = CatalogKey(("b",), 150)
    decoder.decode([stream_commit(20, 100)])
    changed = update(TABLE, [b"1", b"2", b"4"], [b"1", b"2", b"3"], b"O")
    after = decoder.decode([begin(21), ROW, changed, commit(140), begin(22), ROW, changed, commit(200)])
    assert keys_of(*opened, *after) == [("a",), (), ("b",)]


BLOCK = [streamed(relation(FULL), 20), streamed(ROW, 20), stream_stop()]


@pytest.mark.parametrize(
    "rest",
    [[], [stream_start(20, is_first=False), *BLOCK], [stream_abort(20, 21)]],
    ids=["whole", "told again", "cut"],
)
def test_R02_X03_the_key_of_a_table_created_in_an_open_transaction_is_described_at_its_commit(
    rest: list[bytes],
) -> None:
    """A committed transaction is still streamed if it was open when its first block was sent."""
    catalog = Catalog()
    catalog.now = None
    decoder = PgOutputDecoder(load_key=catalog.load)
    opened = decoder.decode([stream_start(20), *BLOCK])
    assert keys_of(*opened) == [()]
    catalog.now = CatalogKey(("c", "a"), 150)
    *_, committed = decoder.decode([*rest, stream_commit(20, 100)])
    assert isinstance(committed, PiecesCommitted)
    assert committed.keys == {TABLE: ("a", "c")}
    assert keys_of(*decoder.decode([begin(21), relation(FULL), ROW, commit(140)])) == [("a", "c")]


@pytest.mark.parametrize(
    ("known", "now"),
    [({TABLE: ()}, None), ({TABLE: ()}, CatalogKey(("a",), 150)), ({}, None), ({}, CatalogKey((), 150))],
)
def test_R02_X03_no_key_is_described_at_the_commit_of_an_existing_or_keyless_table(
    known: dict[int, tuple[str, ...]], now: CatalogKey | None
) -> None:
    catalog = Catalog()
    catalog.now = None
    decoder = PgOutputDecoder(known, load_key=catalog.load)
    decoder.decode([stream_start(20), *BLOCK])
    catalog.now = now
    (committed,) = decoder.decode([stream_commit(20, 100)])
    assert isinstance(committed, PiecesCommitted)
    assert committed.keys == {}
