"""Reduction of an epoch to rows to delete and rows to insert: cases by name. Random ones are in
tests/property.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pyarrow as pa
import pytest

from penstock.change import EXACT, UNCHANGED, ChangeType
from penstock.errors import SinkRefusedError, TargetRewoundError
from penstock.position import Position
from penstock.schema import Column, TableName, TableSchema
from penstock.sinks.fold import COUNT, Outcome, fold
from penstock.sinks.modes import CURRENT, DELETED, DELETED_AT, VALID_FROM, VALID_TO, Layout, Mode
from tests.support.property.source_model import PlainTarget, Record, SourceModel, canonical, changes_table
from tests.support.sinks.source import NULL, Change, Row, Transaction, Value, time_of

ITEMS = TableSchema(
    16500,
    TableName("public", "items"),
    (Column("note", pa.string(), 25), Column("id", pa.int64(), 20), Column("size", pa.int32(), 23)),
    ("id",),
)
FLOATS = TableSchema(
    16501,
    TableName("public", "floats"),
    (Column("id", pa.float64(), 701), Column("note", pa.string(), 25)),
    ("id",),
)
NUMBERS = TableSchema(
    16502,
    TableName("public", "numbers"),
    (Column("id", pa.decimal128(10, 2), 1700), Column("price", pa.decimal128(10, 2), 1700)),
    ("id",),
)
HEAP = TableSchema(
    16503,
    TableName("public", "heap"),
    (Column("a", pa.int32(), 23), Column("b", pa.decimal128(10, 2), 1700)),
    (),
)

LAID_UP = (Mode.MIRROR, Mode.SOFT_DELETE, Mode.HISTORY)
every_mode = pytest.mark.parametrize("mode", LAID_UP)


def layout_of(table: TableSchema, mode: Mode) -> Layout:
    return Layout(
        pa.schema([pa.field(column.name, column.arrow_type) for column in table.columns]), table.key, mode
    )


def item(key: int, note: str | None = "note", size: int | None = 1) -> Row:
    return {"note": Value(note), "id": Value(key), "size": Value(size)}


def key(value: object, text: str | None = None) -> tuple[Value]:
    return (Value(value, text),)


class Followed:
    """A source and its target; `follow` applies all new changes in one epoch."""

    def __init__(self, table: TableSchema, mode: Mode, rows: Sequence[Row] = ()) -> None:
        self.source = SourceModel(table, rows)
        self.layout = layout_of(table, mode)
        self.target = PlainTarget(self.layout, self.source.expected(mode, self.source.fence))
        self._done = 0

    def outcome(self) -> Outcome:
        changes = changes_table(self.source.table, self.source.log[self._done :])
        return fold(changes, self.layout, self.target.lookup)

    def follow(self) -> Outcome:
        outcome = self.outcome()
        self._done = len(self.source.log)
        self.target.apply(outcome)
        expected = self.source.expected(self.layout.mode, self.source.position)
        assert canonical(self.target.rows, self.layout) == canonical(expected, self.layout)
        return outcome

    def row(self, value: object) -> Record:
        (found,) = [row for row in self.target.rows if row["id"] == value and row.get(CURRENT, True)]
        return found


@every_mode
@pytest.mark.parametrize("there", [False, True])
def test_K02_every_order_of_changes_of_one_key_gives_the_last_of_them(mode: Mode, there: bool) -> None:
    for steps in product(["change", "toggle", "commit"], repeat=5):
        followed = Followed(ITEMS, mode, [item(1, "first")] if there else [])
        source = followed.source
        for at, step in enumerate(steps):
            if step == "commit":
                source.commit()
            elif not source.rows:
                source.insert(item(1, f"inserted {at}"))
            elif step == "toggle":
                source.delete(key(1))
            else:
                source.update(key(1), {"note": Value(f"updated {at}")}, ["size"] if at % 2 else [])
        source.commit()
        assert not followed.follow().emptied, "only a truncate does that"


def test_K03_an_epoch_of_inserts_takes_nothing_out_and_looks_nothing_up() -> None:
    followed = Followed(ITEMS, Mode.MIRROR, [item(1)])
    followed.source.insert(item(2))
    followed.source.insert(item(3, None, None))
    followed.source.update(key(3), {"note": Value("changed")})
    followed.source.commit()
    outcome = followed.follow()
    assert not outcome.deleted.num_rows
    assert followed.target.lookups == 0
    assert outcome.rows.column("id").to_pylist() == [2, 3]


@every_mode
def test_R13_nulls_are_values_and_a_delete_shows_its_key_alone(mode: Mode) -> None:
    followed = Followed(ITEMS, mode, [item(1, "was"), item(2, None, None)])
    followed.source.update(key(1), {"note": NULL})
    followed.source.delete(key(2))
    followed.source.commit()
    followed.follow()
    assert followed.row(1)["note"] is None


@every_mode
def test_K04_an_unchanged_value_is_the_one_of_the_target_or_the_last_that_travelled(mode: Mode) -> None:
    followed = Followed(ITEMS, mode, [item(1, "old"), item(2, "old"), item(3, None)])
    followed.source.update(key(1), {"size": Value(9)}, ["note"])
    followed.source.update(key(2), {"note": Value("R11: set, then left")})
    followed.source.update(key(2), {"size": Value(9)}, ["note"])
    followed.source.insert(item(4, "born"))
    followed.source.update(key(4), {"size": Value(9)}, ["note"])
    followed.source.update(key(3), {"note": Value("no longer null")})
    followed.source.commit()
    followed.follow()
    assert [followed.row(at)["note"] for at in (1, 2, 3, 4)] == [
        "old",
        "R11: set, then left",
        "no longer null",
        "born",
    ]
    assert followed.target.lookups == 1


def test_R07_a_mirror_asks_only_for_keys_whose_values_did_not_travel() -> None:
    followed = Followed(ITEMS, Mode.MIRROR, [item(1, "old"), item(2, "old")])
    followed.source.update(key(1), {"size": Value(9)}, ["note"])
    followed.source.update(key(2), {"note": Value("new")})
    followed.source.commit()
    asked: list[pa.Table | None] = []

    def lookup(keys: pa.Table | None) -> pa.Table:
        asked.append(keys)
        return followed.target.lookup(keys)

    fold(changes_table(ITEMS, followed.source.log), followed.layout, lookup)
    (keys,) = asked
    assert keys is not None
    assert keys.to_pylist() == [{"id": 1, EXACT: None}]


@every_mode
def test_K05_an_unchanged_value_of_a_key_change_is_taken_from_the_old_keys_row(mode: Mode) -> None:
    followed = Followed(ITEMS, mode, [item(1, "one"), item(2, "two"), item(3, "three")])
    source = followed.source
    # A chain, a swap over a third key, and a key that is reused at once.
    source.update(key(1), {"id": Value(10)}, ["note"])
    source.update(key(10), {"id": Value(11)}, ["note"])
    source.skip_ordinals(3)
    source.update(key(11), {"size": Value(7)}, ["note"])
    source.update(key(2), {"id": Value(20)}, ["note"])
    source.update(key(3), {"id": Value(2)}, ["note"])
    source.update(key(20), {"id": Value(3)}, ["note"])
    source.insert(item(1, "again"))
    source.commit()
    followed.follow()
    assert {at: followed.row(at)["note"] for at in (1, 2, 3, 11)} == {
        1: "again",
        2: "three",
        3: "two",
        11: "one",
    }
    assert followed.target.lookups == 1
    source.update(key(2), {"id": Value(30)}, ["note", "size"])
    source.delete(key(30))
    source.commit()
    followed.follow()


@every_mode
@pytest.mark.parametrize("unchanged", [[], ["note"]])
def test_R06_a_key_that_changes_to_an_equal_one_is_the_same_key(mode: Mode, unchanged: list[str]) -> None:
    layout = layout_of(FLOATS, mode)
    old: Row = {"id": Value(0.0), "note": Value("kept")}
    target = PlainTarget(layout, SourceModel(FLOATS, [old]).expected(mode, 100))
    new: Row = {"id": Value(-0.0)} if unchanged else {"id": Value(-0.0), "note": Value("kept")}
    halves = (
        Change(ChangeType.DELETE, 4, {"id": Value(0.0)}),
        Change(ChangeType.INSERT, 5, new, tuple(unchanged)),
    )
    target.apply(fold(changes_table(FLOATS, [Transaction(110, halves)]), layout, target.lookup))
    (live,) = [row for row in target.rows if row.get(CURRENT, True)]
    assert (str(live["id"]), live["note"], live.get(DELETED, False)) == ("-0.0", "kept", False)
    assert len(target.rows) == (2 if mode is Mode.HISTORY else 1)


@every_mode
@pytest.mark.parametrize("table", [ITEMS])
def test_a_kept_value_whose_row_is_gone_from_the_target_is_an_error(mode: Mode, table: TableSchema) -> None:
    for moves in (False, True):
        followed = Followed(table, mode, [item(1, "only here")])
        followed.target.rows.clear()
        followed.source.update(key(1), {"id": Value(2)} if moves else {"size": Value(2)}, ["note"])
        followed.source.commit()
        with pytest.raises(TargetRewoundError, match="no longer in the target") as caught:
            followed.outcome()
        assert caught.value.hint


@every_mode
def test_an_insert_that_leaves_values_behind_without_its_other_half_is_an_error(mode: Mode) -> None:
    layout = layout_of(ITEMS, mode)
    target = PlainTarget(layout, SourceModel(ITEMS, [item(1), item(2)]).expected(mode, 100))
    for first in (
        Change(ChangeType.DELETE, 3, {"id": Value(1)}),
        Change(ChangeType.UPDATE_POSTIMAGE, 4, item(1)),
        Change(ChangeType.DELETE, 4, {"id": Value(1)}),
    ):
        lone = Change(ChangeType.INSERT, 5, {"id": Value(2), "size": Value(1)}, ("note",))
        changes = changes_table(ITEMS, [Transaction(110, (first, lone))])
        if first.kind is ChangeType.DELETE and first.ordinal == 4:
            assert fold(changes, layout, target.lookup).rows.num_rows
        else:
            with pytest.raises(TargetRewoundError):
                fold(changes, layout, target.lookup)


@every_mode
def test_a_delete_of_a_row_that_the_target_lacks_changes_nothing(mode: Mode) -> None:
    followed = Followed(ITEMS, mode, [item(1), item(2)])
    followed.target.rows = [row for row in followed.target.rows if row["id"] == 2]
    before = list(followed.target.rows)
    followed.source.delete(key(1))
    followed.source.commit()
    followed.target.apply(followed.outcome())
    assert followed.target.rows == before


@every_mode
def test_R12_a_truncate_ends_the_rows_before_it_in_the_log(mode: Mode) -> None:
    followed = Followed(
        ITEMS,
        mode,
        [item(1, "untouched"), item(2, "deleted"), item(3, "changed"), item(4, "moved"), item(9, "flagged")],
    )
    source = followed.source
    source.delete(key(9))
    source.commit()
    followed.follow()
    source.delete(key(2))
    source.update(key(3), {"size": Value(5)}, ["note"])
    source.update(key(4), {"id": Value(40)}, ["note"])
    source.insert(item(5, "born"))
    first = source.commit()
    source.truncate()
    source.insert(item(1, "again"))
    source.insert(item(6, "short"))
    source.commit()
    source.update(key(1), {"size": Value(8)}, ["note"])
    source.truncate()
    last = source.commit()
    source.truncate()
    source.insert(item(7, "stays"))
    source.commit()
    outcome = followed.follow()
    assert outcome.emptied == (mode is Mode.MIRROR)
    if mode is Mode.MIRROR:
        assert not outcome.deleted.num_rows
    if mode is Mode.SOFT_DELETE:
        times = {row["id"]: row[DELETED_AT] for row in followed.target.rows}
        assert (times[2], times[1], times[7]) == (time_of(first), time_of(last), None)
        assert (followed.row(3)["note"], followed.row(40)["note"]) == ("changed", "moved")


def test_R12_an_append_log_shows_the_truncate() -> None:
    source = SourceModel(ITEMS, [item(1)])
    source.update(key(1), {"size": Value(5)}, ["note"])
    source.truncate()
    source.insert(item(2))
    source.commit()
    layout = layout_of(ITEMS, Mode.APPEND)
    outcome = fold(changes_table(ITEMS, source.log), layout, PlainTarget(layout, []).lookup)
    assert not outcome.emptied
    rows = outcome.rows.to_pylist()
    assert [(row["_change_type"], row["id"], row[UNCHANGED]) for row in rows] == [
        ("update_postimage", 1, ["note"]),
        ("truncate", None, None),
        ("insert", 2, None),
    ]


@every_mode
def test_R01_texts_go_with_their_values_kept_or_not_and_tell_keys_apart(mode: Mode) -> None:
    rows: list[Row] = [
        {"id": Value(None, text), "price": Value(None, f"{text}0")} for text in ("1e40", "2e40", "3e40")
    ]
    followed = Followed(NUMBERS, mode, rows)
    source = followed.source
    source.update(key(None, "1e40"), {}, ["price"])
    source.update(key(None, "2e40"), {"id": Value(None, "NaN")}, ["price"])
    source.update(key(None, "3e40"), {"price": Value(pa.scalar(5, pa.decimal128(10, 2)).as_py())})
    source.commit()
    outcome = followed.follow()
    assert [row[EXACT] for row in outcome.deleted.to_pylist() if row[EXACT] != [("id", "NaN")]] == [
        [("id", f"{at}e40")] for at in (1, 2, 3)
    ]


def test_K16_a_history_has_one_version_for_each_key_and_commit() -> None:
    followed = Followed(ITEMS, Mode.HISTORY, [item(1, "a")])
    source = followed.source
    source.delete(key(1))
    source.insert(item(1, "b"))
    source.update(key(1), {"note": Value("c")})
    source.insert(item(2, "gone within its transaction"))
    source.delete(key(2))
    first = source.commit()
    source.delete(key(1))
    second = source.commit()
    source.insert(item(1, "d"))
    third = source.commit()
    followed.follow()
    versions = sorted((row[VALID_FROM], row["note"], row[VALID_TO]) for row in followed.target.rows)
    assert versions == [(100, "a", first), (first, "c", second), (third, "d", None)]


def test_R05_equal_rows_without_key_go_by_number() -> None:
    layout = layout_of(HEAP, Mode.MIRROR)
    one: Row = {"a": Value(1), "b": Value(None, "NaN")}
    other: Row = {"a": Value(1), "b": NULL}
    kinds = [
        (ChangeType.DELETE, one),
        (ChangeType.INSERT, other),
        (ChangeType.DELETE, one),
        (ChangeType.INSERT, other),
    ]
    kinds += [
        (ChangeType.INSERT, one),
        (ChangeType.DELETE, one),
        (ChangeType.INSERT, {"a": NULL, "b": NULL}),
        (ChangeType.DELETE, other),
    ]
    changes = tuple(Change(kind, at, row) for at, (kind, row) in enumerate(kinds))
    target = PlainTarget(layout, [])
    outcome = fold(changes_table(HEAP, [Transaction(110, changes)]), layout, target.lookup)
    assert outcome.deleted.to_pylist() == [{"a": 1, "b": None, EXACT: [("b", "NaN")], COUNT: 2}]
    assert outcome.rows.to_pylist() == [{"a": 1, "b": None, EXACT: None}, {"a": None, "b": None, EXACT: None}]


def test_R05_a_column_that_is_called_as_a_count_is_a_column() -> None:
    table = TableSchema(1, TableName("public", "t"), (Column("_count", pa.int64(), 20),), ())
    layout = layout_of(table, Mode.MIRROR)
    changes = tuple(Change(ChangeType.DELETE, at, {"_count": Value(7)}) for at in range(2))
    outcome = fold(changes_table(table, [Transaction(110, changes)]), layout, PlainTarget(layout, []).lookup)
    assert outcome.deleted.column("_count").to_pylist() == [7]
    assert outcome.deleted.column(COUNT).to_pylist() == [2]


def test_R04_an_update_without_key_and_old_row_is_refused() -> None:
    layout = layout_of(HEAP, Mode.MIRROR)
    for change in (
        Change(ChangeType.UPDATE_POSTIMAGE, 0, {"a": Value(1)}),
        Change(ChangeType.INSERT, 0, {"a": Value(1)}, ("b",)),
    ):
        with pytest.raises(SinkRefusedError, match="without a key") as caught:
            fold(changes_table(HEAP, [Transaction(110, (change,))]), layout, PlainTarget(layout, []).lookup)
        assert "REPLICA IDENTITY FULL" in str(caught.value.hint)


def test_R16_changes_count_in_the_order_of_position_and_ordinal_not_as_they_come() -> None:
    layout = layout_of(ITEMS, Mode.MIRROR)
    changes = changes_table(
        ITEMS,
        [
            Transaction(
                120,
                (
                    Change(ChangeType.UPDATE_POSTIMAGE, 1, item(1, "last")),
                    Change(ChangeType.UPDATE_POSTIMAGE, 0, item(1, "third")),
                ),
            ),
            Transaction(
                110,
                (
                    Change(ChangeType.INSERT, 0, item(1, "first")),
                    Change(ChangeType.UPDATE_POSTIMAGE, 1, item(1, "second")),
                ),
            ),
        ],
    )
    outcome = fold(changes, layout, PlainTarget(layout, []).lookup)
    assert outcome.rows.column("note").to_pylist() == ["last"]
    assert not outcome.deleted.num_rows


@pytest.mark.parametrize("mode", list(Mode))
def test_no_changes_give_no_rows(mode: Mode) -> None:
    layout = layout_of(ITEMS, mode)
    outcome = fold(changes_table(ITEMS, []), layout, PlainTarget(layout, []).lookup)
    assert (outcome.emptied, outcome.deleted.num_rows, outcome.rows.num_rows) == (False, 0, 0)
    assert outcome.rows.schema.equals(layout.schema)


@pytest.mark.parametrize("mode", list(Mode))
def test_K16_a_snapshots_rows_are_as_the_mode_has_them(mode: Mode) -> None:
    layout = layout_of(ITEMS, mode)
    known = layout.mode.snapshot_values(Position.of(100), time_of(100))
    assert [*ITEMS.column_names, *known, EXACT] == layout.schema.names
    record = {"note": "a", "id": 1, "size": 1, **known, EXACT: None}
    if mode is Mode.APPEND:
        assert (record["_change_type"], record["_commit_version"], record["_ordinal"]) == ("snapshot", 100, 0)
    else:
        assert [record] == SourceModel(ITEMS, [item(1, "a")]).expected(mode, 100)


def test_a_layout_refuses_properties_that_its_mode_cannot_have() -> None:
    with pytest.raises(SinkRefusedError, match="_deleted"):
        Layout(pa.schema([("id", pa.int32()), (DELETED, pa.bool_())]), ("id",), Mode.SOFT_DELETE)
    assert (
        DELETED
        in Layout(pa.schema([("id", pa.int32()), (DELETED, pa.bool_())]), ("id",), Mode.MIRROR).schema.names
    )
    for mode in (Mode.SOFT_DELETE, Mode.HISTORY):
        with pytest.raises(SinkRefusedError, match="without a key"):
            layout_of(HEAP, mode)


def test_the_identity_of_a_row_depends_on_the_mode() -> None:
    assert {mode: layout_of(ITEMS, mode).identity for mode in Mode} == {
        Mode.MIRROR: ("id",),
        Mode.SOFT_DELETE: ("id",),
        Mode.HISTORY: ("id", VALID_FROM),
        Mode.APPEND: (),
    }
    assert layout_of(HEAP, Mode.MIRROR).identity == ()
