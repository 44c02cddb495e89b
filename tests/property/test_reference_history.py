"""`ReferenceHistory` against a model: a dictionary for every version."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.change import CHANGE_TYPE, COMMIT_VERSION, ORDINAL, UNCHANGED, XID, ChangeType
from penstock.contracts.reference import reference_schema
from penstock.reference.history import ReferenceHistory, row_schema

COLUMNS = pa.schema(
    [pa.field("id", pa.int64()), pa.field("note", pa.string()), pa.field("long", pa.string())]
)
SCHEMA = reference_schema(COLUMNS)
FLOOR = 10

Row = tuple[str | None, str | None]
Table = dict[int, Row]


@dataclass
class SourceModel:
    """Transactions played against a dictionary: the batches that they make, and the table after each
    version.
    """

    rows: list[dict[str, object]]
    states: dict[int, Table]


@st.composite
def chronicles(draw: st.DrawFn) -> SourceModel:
    table: Table = {key: (f"n{key}", f"l{key}") for key in draw(st.sets(st.integers(0, 4)))}
    source_model = SourceModel([], {FLOOR: dict(table)})
    version = FLOOR
    for _ in range(draw(st.integers(0, 6))):
        version += draw(st.integers(1, 3))
        ordinal = 0
        for _ in range(draw(st.integers(1, 4))):
            for change in draw_changes(draw, table):
                ordinal += 1
                source_model.rows.append({COMMIT_VERSION: version, ORDINAL: ordinal, XID: 1, **change})
        source_model.states[version] = dict(table)
    return source_model


def draw_changes(draw: st.DrawFn, table: Table) -> list[dict[str, object]]:
    key, other = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    note = draw(st.sampled_from([None, "", "a", "b"]))
    kind = draw(st.sampled_from(["upsert", "upsert", "keep", "delete", "move", "truncate"]))
    if kind == "truncate":
        table.clear()
        return [{CHANGE_TYPE: ChangeType.TRUNCATE}]
    if kind == "upsert" or key not in table:
        existed = key in table
        table[key] = (note, "long")
        kind_of = ChangeType.UPDATE_POSTIMAGE if existed else ChangeType.INSERT
        return [{CHANGE_TYPE: kind_of, "id": key, "note": note, "long": "long"}]
    if kind == "keep":
        table[key] = (note, table[key][1])
        return [{CHANGE_TYPE: ChangeType.UPDATE_POSTIMAGE, "id": key, "note": note, UNCHANGED: ["long"]}]
    gone = table.pop(key)
    deleted: dict[str, object] = {CHANGE_TYPE: ChangeType.DELETE, "id": key}
    if kind == "delete" or other in table or other == key:
        return [deleted]
    table[other] = (note, gone[1])
    return [deleted, {CHANGE_TYPE: ChangeType.INSERT, "id": other, "note": note, UNCHANGED: ["long"]}]


def batch_of(rows: list[dict[str, object]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


def history_of(source_model: SourceModel, cuts: list[int]) -> ReferenceHistory:
    history = ReferenceHistory(COLUMNS, ["id"], FLOOR)
    first = [
        {"id": key, "note": note, "long": long} for key, (note, long) in source_model.states[FLOOR].items()
    ]
    history.load(pa.RecordBatch.from_pylist(first, row_schema(COLUMNS)))
    places = sorted({0, len(source_model.rows), *(cut for cut in cuts if cut < len(source_model.rows))})
    for start, end in pairwise(places):
        history.apply(batch_of(source_model.rows[start:end]))
    return history


def state_before(source_model: SourceModel, version: int) -> Table:
    return source_model.states[max(known for known in source_model.states if known <= version)]


def as_table(rows: pa.Table) -> Table:
    return {row["id"]: (row["note"], row["long"]) for row in rows.to_pylist()}


@settings(max_examples=40)
@given(chronicles(), st.lists(st.integers(0, 30), max_size=4))
def test_every_version_is_found_as_it_was_however_the_changes_are_cut(
    source_model: SourceModel, cuts: list[int]
) -> None:
    history = history_of(source_model, cuts)
    last = max(source_model.states)
    for version in range(FLOOR, last + 2):
        expected = state_before(source_model, version)
        assert as_table(history.rows_at(version)) == expected
        keys = [*range(5), 99]
        found = history.take(history.find([(key,) for key in keys], [version] * len(keys))).to_pylist()
        assert {row["id"]: (row["note"], row["long"]) for row in found if row["id"] is not None} == expected
        assert [row["id"] for row in found] == [key if key in expected else None for key in keys], (
            "each at the place of its key"
        )


@settings(max_examples=40)
@given(chronicles())
def test_now_is_the_last_version(source_model: SourceModel) -> None:
    history = history_of(source_model, [])
    expected = source_model.states[max(source_model.states)]
    places = history.find([(key,) for key in range(5)] + [None])
    assert [place is not None for place in places.to_pylist()] == [
        *(key in expected for key in range(5)),
        False,
    ]


@settings(max_examples=40)
@given(chronicles(), st.integers(0, 20))
def test_table_that_was_folded_answers_as_before(source_model: SourceModel, ahead: int) -> None:
    """As in the product: a base of one version, and the changes after it."""
    whole = history_of(source_model, [])
    floor = FLOOR + ahead
    folded = ReferenceHistory(COLUMNS, ["id"], floor)
    for batch in whole.rows_at(floor).to_batches():
        folded.load(batch)
    left = [row for row in source_model.rows if int(str(row[COMMIT_VERSION])) > floor]
    folded.apply(batch_of(left))
    for version in range(floor, floor + 25):
        assert as_table(folded.rows_at(version)) == as_table(whole.rows_at(version))
