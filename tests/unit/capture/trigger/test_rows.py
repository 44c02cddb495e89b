"""From rows of the change table to change batches."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from penstock.capture.trigger.rows import CommitFacts, RecordedChanges, build_batches, restored, table_schema
from penstock.change import REPLACED, ChangeBatch
from penstock.postgres.change_table import Field, Shape
from penstock.postgres.types.registry import TypeResolver
from penstock.schema import TableName

INT, TEXT = 23, 25
NAME = TableName("public", "t")
COMMITS = {
    position: CommitFacts(position + 1000, datetime(2026, 1, position, tzinfo=UTC)) for position in (1, 2, 3)
}
TABLES = {1: 7, 2: 7, 9: 8}
"""Of each shape, its table."""

Noted = tuple[int, int, int, str, str | None, str | None]
"""Position, number in the transaction, shape, kind, old row, new row."""
Placed = tuple[int, int, int, str, str | None, str | None, str | None, str | None]
"""The same, with the place of the old row, and that of the new row if a session has locked or changed it."""


def shape(
    number: int, *columns: tuple[str, int], key: tuple[str, ...] = ("id",), generated: tuple[str, ...] = ()
) -> Shape:
    fields = tuple(Field(name, oid, -1, name in generated, rank) for rank, (name, oid) in enumerate(columns))
    return Shape(number, 7, NAME, fields, key)


PLAIN = shape(1, ("id", INT), ("note", TEXT))


def batches(*noted: Noted, shapes: tuple[Shape, ...] = (PLAIN,)) -> tuple[ChangeBatch, ...]:
    return placed_batches(
        *((at, number, of, kind, None, None, old, new) for at, number, of, kind, old, new in noted),
        shapes=shapes,
    )


def placed_batches(*noted: Placed, shapes: tuple[Shape, ...] = (PLAIN,)) -> tuple[ChangeBatch, ...]:
    listed = [list(column) for column in zip(*noted, strict=True)]
    listed.insert(2, [TABLES[of] for of in listed[2]])
    columns = [
        pa.array([None if value is None else str(value) for value in column], pa.string())
        for column in listed
    ]
    resolver = TypeResolver()
    known = {each.id: (each, table_schema(each, resolver)) for each in shapes}
    return build_batches(RecordedChanges.of(columns), known, COMMITS)


def rows(batch: ChangeBatch) -> list[tuple[Any, ...]]:
    """Position, ordinal, kind, and the table's own columns."""
    own = batch.table.column_names
    return [
        (row["_commit_version"], row["_ordinal"], row["_change_type"], *(row[name] for name in own))
        for row in batch.rows.to_pylist()
    ]


def test_every_kind_of_change_gives_the_same_rows_as_the_log() -> None:
    (batch,) = batches(
        (1, 0, 1, "I", None, "(1,a)"),
        (1, 3, 1, "U", "(1,a)", '(1,"b c")'),
        (2, 0, 1, "D", '(1,"b c")', None),
        (2, 1, 1, "T", None, None),
    )
    assert rows(batch) == [
        (1, 0, "insert", 1, "a"),
        (1, 6, "update_postimage", 1, "b c"),
        (2, 0, "delete", 1, None),
        (2, 2, "truncate", None, None),
    ]
    counts = batch.counts
    assert (counts.inserts, counts.updates, counts.deletes, counts.truncates, counts.moves) == (1, 1, 1, 1, 0)
    first = batch.rows.to_pylist()[0]
    assert (first["_xid"], first["_commit_timestamp"]) == (1001, datetime(2026, 1, 1, tzinfo=UTC))


def test_key_change_is_a_delete_and_an_insert_with_two_ordinals() -> None:
    (batch,) = batches((1, 0, 1, "U", "(1,a)", "(2,a)"), (1, 1, 1, "U", "(3,a)", "(3,b)"))
    assert rows(batch) == [
        (1, 0, "delete", 1, None),
        (1, 1, "insert", 2, "a"),
        (1, 2, "update_postimage", 3, "b"),
    ]
    assert (batch.counts.moves, batch.counts.inserts, batch.counts.deletes) == (1, 1, 1)


def test_update_of_a_row_without_key_is_a_delete_of_the_whole_row_and_an_insert() -> None:
    keyless = shape(1, ("a", INT), ("b", TEXT), key=())
    (batch,) = batches((1, 0, 1, "U", "(1,)", "(1,x)"), (1, 1, 1, "D", "(1,x)", None), shapes=(keyless,))
    assert rows(batch) == [(1, 0, "delete", 1, None), (1, 1, "insert", 1, "x"), (1, 2, "delete", 1, "x")]


def test_change_recorded_late_precedes_its_consequences() -> None:
    (batch,) = placed_batches(
        (1, 0, 1, "U", "(0,1)", None, "(1,a)", "(1,b)"),
        (1, 1, 1, "U", "(0,6)", None, "(2,y)", "(2,z)"),  # by a trigger, of a trigger, of the statement
        (1, 2, 1, "U", "(0,5)", "(0,6)", "(2,x)", "(2,y)"),
        (1, 3, 1, "U", "(0,2)", "(0,5)", "(2,a)", "(2,x)"),  # of the statement itself
        (
            1,
            4,
            1,
            "U",
            "(0,3)",
            "(0,7)",
            "(3,a)",
            "(3,b)",
        ),  # the transaction ID is newer because a session has locked the row
        (2, 0, 1, "U", "(0,7)", None, "(3,b)", "(3,c)"),
    )
    assert rows(batch) == [
        (1, 0, "update_postimage", 1, "b"),
        (1, 2, "update_postimage", 2, "x"),
        (1, 4, "update_postimage", 2, "y"),
        (1, 6, "update_postimage", 2, "z"),
        (1, 8, "update_postimage", 3, "b"),
        (2, 0, "update_postimage", 3, "c"),
    ]


def test_row_that_is_locked_and_restored_stays_in_order() -> None:
    (batch,) = placed_batches(
        (1, 0, 1, "U", "(0,1)", None, "(1,a)", "(1,b)"),
        (1, 1, 1, "U", "(0,2)", "(0,3)", "(1,b)", "(1,a)"),
    )
    assert [row[-1] for row in rows(batch)] == ["b", "a"]


def test_change_is_never_put_on_the_other_side_of_a_truncate() -> None:
    """Rows inserted after a truncate reuse tids."""
    (batch,) = placed_batches(
        (1, 0, 1, "U", "5(0,2)", None, "(11,a)", "(11,b)"),
        (1, 1, 1, "T", None, None, None, None),
        (1, 2, 1, "I", None, "5(0,2)", None, "(2,x)"),
    )
    assert [row[2] for row in rows(batch)] == ["update_postimage", "truncate", "insert"]


def test_truncate_of_another_table_keeps_no_change_from_its_place() -> None:
    other = replace(shape(9, ("id", INT)), oid=8, name=TableName("public", "other"))
    batch, _ = placed_batches(
        (1, 0, 1, "U", "5(0,2)", None, "(1,x)", "(1,y)"),
        (1, 1, 9, "T", None, None, None, None),
        (1, 2, 1, "U", "5(0,1)", "5(0,2)", "(1,a)", "(1,x)"),
        shapes=(PLAIN, other),
    )
    assert [row[-1] for row in rows(batch)] == ["x", "y"]


def test_change_is_found_by_its_table_although_columns_were_altered_in_between() -> None:
    wider = shape(2, ("id", INT), ("note", TEXT), ("more", INT))
    first, second = placed_batches(
        (1, 0, 1, "U", "5(0,2)", None, "(1,x)", "(1,y)"),
        (1, 1, 2, "U", "5(0,1)", "5(0,2)", "(1,a,)", "(1,x,)"),
        shapes=(PLAIN, wider),
    )
    assert [(row[1], row[4]) for batch in (first, second) for row in rows(batch)] == [(0, "x"), (2, "y")]


def test_generated_columns_are_read_over() -> None:
    generated = shape(1, ("twice", INT), ("id", INT), ("note", TEXT), generated=("twice",))
    (batch,) = batches((1, 0, 1, "I", None, "(2,1,x)"), shapes=(generated,))
    assert batch.table.column_names == ("id", "note")
    assert rows(batch) == [(1, 0, "insert", 1, "x")]


def test_partitions_that_look_alike_make_one_batch_in_order() -> None:
    fields = (Field("note", TEXT, -1, False, 1), Field("id", INT, -1, False, 0))
    other = Shape(2, 7, NAME, fields, ("id",))
    (batch,) = batches(
        (1, 0, 1, "I", None, "(1,a)"),
        (1, 1, 2, "I", None, "(b,2)"),
        (2, 0, 1, "I", None, "(3,c)"),
        shapes=(PLAIN, other),
    )
    assert rows(batch) == [(1, 0, "insert", 1, "a"), (1, 2, "insert", 2, "b"), (2, 0, "insert", 3, "c")]
    assert batch.counts.inserts == 3


def test_different_schemas_make_separate_batches_in_order() -> None:
    wider = shape(2, ("id", INT), ("note", TEXT), ("more", INT))
    first, second = batches(
        (1, 0, 1, "I", None, "(1,a)"), (2, 0, 2, "I", None, "(2,b,5)"), shapes=(PLAIN, wider)
    )
    assert rows(first) == [(1, 0, "insert", 1, "a")]
    assert rows(second) == [(2, 0, "insert", 2, "b", 5)]


def test_row_of_another_shape_than_was_written_down_stops_its_table_and_no_other() -> None:
    other = replace(shape(9, ("id", INT)), oid=8, name=TableName("public", "other"))
    lost, good = batches(
        (1, 0, 1, "I", None, "(1,a,b)"),
        (1, 1, 9, "I", None, "(5)"),
        (1, 2, 1, "T", None, None),
        shapes=(PLAIN, other),
    )
    assert rows(good) == [(1, 2, "insert", 5)]
    assert (lost.counts.unreadable, lost.counts.inserts, lost.counts.truncates, lost.counts.inexact) == (
        2,
        1,
        1,
        1,
    )
    assert [(row["id"], row["note"], row["_exact"]) for row in lost.rows.to_pylist()] == [
        (None, None, [("id", f"{REPLACED}(1,a,b)"), ("note", f"{REPLACED}(1,a,b)")]),
        (None, None, None),
    ]


def test_row_of_an_unknown_schema_is_not_taken_for_another() -> None:
    noted = [["1"], ["0"], ["7"], ["1"], ["I"], [None], [None], [None], ["(1,b)"], ["{1,3}"]]
    columns = [pa.array(each, pa.string()) for each in noted]
    asked: list[tuple[int, str]] = []
    known = {1: (PLAIN, table_schema(PLAIN, TypeResolver()))}
    changes = RecordedChanges.of(restored(columns, lambda *told: asked.append(told)))
    (batch,) = build_batches(changes, known, COMMITS)
    assert (asked, changes.shape_ids, batch.counts.unreadable) == ([(1, "{1,3}")], [1], 2)
