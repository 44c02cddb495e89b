"""Apply a transform to rows and changes: filter them, compute columns, and reject rows whose result is
unknown.

The functions do no I/O. They run on executors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow import Bools, bitmap
from penstock.change import (
    CHANGE_TYPE,
    EXACT,
    EXACT_TYPE,
    METADATA_FIELDS,
    UNCHANGED,
    ChangeCounts,
    ChangeType,
)
from penstock.sinks.row_chains import is_kind
from penstock.sinks.row_values import build_exact
from penstock.transforms.columns import Made, MadeColumn, faults
from penstock.transforms.computed import Computed, TargetColumn
from penstock.transforms.condition import TriState, Values
from penstock.transforms.spark_exchange import Answers
from penstock.transforms.transform import Fitted
from penstock.transforms.values import (
    Absences,
    Filled,
    fill,
    given_values,
    inexact,
    target_lists,
    typed_values,
)

REASON = "_reason\0"
"""Name of the last column of rejected rows. It contains the reason for the rejection, which names columns and
never contains values. No source column can have this name.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The result of a transform: kept rows and rejected rows. The filter left out all other rows."""

    kept: pa.Table
    """The kept rows in the target's form: the columns of `Transform.schema` and `_exact`. Changes also have
    all `METADATA_FIELDS`.
    """
    refused: pa.Table
    """The rejected rows in the source's form: all columns of the source, and `REASON`."""

    @property
    def reasons(self) -> dict[str, int]:
        """The number of rejected rows for each reason."""
        counted = pc.value_counts(self.refused.column(REASON)).to_pylist()
        return {str(each["values"]): int(each["counts"]) for each in counted}


Doubts = list[tuple[str, Bools]]
"""The reasons to reject rows, each with a mask of the rows that it concerns."""

_FULL = "with REPLICA IDENTITY FULL every change has all values"
_UNKNOWN = f"the filter depends on a value that the change lacks; {_FULL}"
_ERROR = (
    "Spark met an error, such as a text that is not a number, a number that is too large or a "
    "division by zero"
)


def judge(fitted: Fitted, block: pa.Table, answers: Answers | None = None) -> tuple[TriState, Doubts]:
    """Evaluate the filter. Returns its result for each row, and the reasons why results are unknown, each
    with a mask of the rows that it concerns.
    """
    if not fitted.is_filter:
        everything = np.ones(block.num_rows, np.bool_)
        return TriState(everything, ~everything, ~everything), []
    absences = Absences(block)
    columns: dict[str, pa.Array] = {}
    missing: dict[str, Bools] = {}
    for column in fitted.condition_columns:
        given = typed_values(block, column)
        columns[column.name] = given.values
        missing[column.name] = inexact(given) | absences.of(column.name)
    if fitted.condition is not None:
        verdict = fitted.condition.judge(Values(columns, missing, block.num_rows))
        return verdict, [(_UNKNOWN, verdict.missing)]
    assert answers is not None, "Spark was asked before"
    values, failed = answers.where
    unknown = np.zeros(block.num_rows, np.bool_)
    for each in missing.values():
        unknown |= each
    verdict = TriState.of(values, unknown | failed)
    return verdict, [(_UNKNOWN, unknown), (f"the filter cannot be evaluated: {_ERROR}", failed)]


def computed_faults(fitted: Fitted, block: pa.Table, answers: Answers | None) -> Iterator[tuple[str, Bools]]:
    """Yield the reasons why values of computed columns are unknown, each with a mask of the rows. A value
    that is computed from a single source column is not reported if the source value is unchanged TOAST,
    because it is then unchanged TOAST too.
    """
    if answers is None or not fitted.computed:
        return
    absences = Absences(block)
    beyond = {column.name: inexact(typed_values(block, column)) for column in fitted.query_columns}
    for each in fitted.computed:
        unchanged, unheld = (
            _any(block, [absences.of(name) for name in each.needs]),
            _any(block, [beyond[name] for name in each.needs]),
        )
        _, failed = answers.column(each)
        if len(each.needs) > 1:
            yield f"column {each.name!r} depends on a value that the change lacks; {_FULL}", unchanged
        yield f"column {each.name!r} depends on a value outside its type", unheld & ~unchanged
        yield f"column {each.name!r} cannot be computed: {_ERROR}", failed & ~unchanged


def _any(block: pa.Table, found: list[Bools]) -> Bools:
    return np.asarray(np.any([np.zeros(block.num_rows, np.bool_), *found], axis=0), np.bool_)


_BLOCK_ROWS = 65_536
_MATCHED_KINDS = (ChangeType.DELETE, ChangeType.TRUNCATE, ChangeType.INSERT, ChangeType.UPDATE_PREIMAGE)
_ORPHAN = (
    "an update moved the row into the filter without all of its values; with REPLICA IDENTITY FULL "
    "every change has all values"
)


def transform_rows(fitted: Fitted, rows: pa.Table, answers: Answers | None = None) -> Outcome:
    """Transform rows of a snapshot, which have the source's columns and `_exact`. `answers`: the results of
    Spark expressions; None if the transform has no Spark expressions.
    """
    schema = pa.schema([*fitted.arrow_schema, pa.field(EXACT, EXACT_TYPE)])
    kept, refused = [], []
    for block, answered in _answered(rows, answers):
        verdict, doubts = judge(fitted, block, answered)
        made = _make(fitted.made, block, answered)
        reasons = _Reasons(block.num_rows)
        for reason, where in doubts:
            reasons.add(reason, where)
        for reason, where in (*_faults(made, block.num_rows), *computed_faults(fitted, block, answered)):
            reasons.add(reason, where & verdict.yes)
        columns = [*(each.values for each in made.values()), _exact(made, block.num_rows)]
        kept.append(pa.table(columns, schema=schema).filter(_flags(verdict.yes & ~reasons.given)))
        refused.append(reasons.refused(block))
    return Outcome(_joined(kept, schema), _joined(refused, _refused_schema(rows.schema)))


def transform_changes(fitted: Fitted, changes: pa.Table, answers: Answers | None = None) -> Outcome:
    """Transform changes. They are in commit order and have the source's columns, then `METADATA_FIELDS`.

    If a result depends on values that some changes lack, pass all changes of the epoch in one call.
    """
    filled: Filled | None = None
    source = changes
    if (
        fitted.needs_earlier_values
        and fitted.source.key
        and changes.column(UNCHANGED).null_count < changes.num_rows
    ):
        filled = fill(changes, fitted.source.key)
        changes = filled.changes
    metadata = [pa.field(field.name, field.type) for field in METADATA_FIELDS]
    schema = pa.schema([*fitted.arrow_schema, *metadata])
    judged = [_judge(fitted, block, answered) for block, answered in _answered(changes, answers)]
    if filled is not None:
        _spread(filled.orphans(np.concatenate([each.left_out for each in judged])), judged)
    kept = [_kept(fitted, each, schema) for each in judged]
    refused = [each.reasons.refused(block) for each, block in zip(judged, _blocks(source), strict=True)]
    return Outcome(_joined(kept, schema), _joined(refused, _refused_schema(changes.schema)))


def transform_keys(fitted: Fitted, keys: pa.Table) -> pa.Table:
    """Transform a table with the source's key columns and `_exact` to one with the target's key columns and
    `_exact`.
    """
    made = _make(fitted.key_columns, keys.combine_chunks())
    values = {each.name: found.values for each, found in made.items()}
    return pa.table({**values, EXACT: _exact(made, keys.num_rows)})


def count_changes(changes: pa.Table, moves: int) -> ChangeCounts:
    """Count transformed changes by kind. `moves` is the number of key changes before the filter, an upper
    bound of the number after it.
    """
    kinds = {kind: int(is_kind(changes, kind).sum()) for kind in ChangeType}
    return ChangeCounts(
        inserts=kinds[ChangeType.INSERT],
        updates=kinds[ChangeType.UPDATE_POSTIMAGE],
        deletes=kinds[ChangeType.DELETE],
        truncates=kinds[ChangeType.TRUNCATE],
        moves=min(moves, kinds[ChangeType.DELETE], kinds[ChangeType.INSERT]),
        unchanged=changes.num_rows - changes.column(UNCHANGED).null_count,
        inexact=changes.num_rows - changes.column(EXACT).null_count,
        preimages=kinds[ChangeType.UPDATE_PREIMAGE],
    )


class _Reasons:
    """Collects the reasons why rows are rejected. If a row has several reasons, the first is kept."""

    def __init__(self, count: int) -> None:
        self.given: Bools = np.zeros(count, np.bool_)
        self._words: list[str] = []
        self._which = np.full(count, -1)

    def add(self, reason: str, rows: Bools) -> None:
        new = rows & ~self.given
        if new.any():
            self._which[new] = len(self._words)
            self._words.append(reason)
            self.given = self.given | new

    def refused(self, block: pa.Table) -> pa.Table:
        places = np.flatnonzero(self.given)
        words = pa.array([self._words[at] for at in self._which[places]], pa.string())
        return block.filter(_flags(self.given)).append_column(pa.field(REASON, pa.string()), words)


@dataclass(slots=True, eq=False)
class _Judged:
    """A block of changes, and the filter's result for each change."""

    block: pa.Table
    made: dict[TargetColumn, Made]
    reasons: _Reasons
    bare: Bools
    """Truncates, and for a table with a key also deletes. The filter is not applied to them."""
    goes: Bools
    """Updates that do not pass the filter. Each becomes a delete of its key."""
    left_out: Bools


def _judge(fitted: Fitted, block: pa.Table, answers: Answers | None) -> _Judged:
    (verdict, doubts), reasons = judge(fitted, block, answers), _Reasons(block.num_rows)
    deleted, truncated, inserted, old = (is_kind(block, kind) for kind in _MATCHED_KINDS)
    # Without a key a delete has the whole row, so the filter gives the same result as for the row's insert.
    bare = truncated | deleted if fitted.source.key else truncated
    for reason, where in doubts:
        reasons.add(reason, where & ~bare)
    stays = verdict.yes | bare
    goes = (
        ~stays & ~inserted & ~deleted & ~old & ~reasons.given if fitted.source.key else np.zeros_like(stays)
    )
    made = _make(fitted.made, block, answers)
    for reason, where in _faults(
        {each: found for each, found in made.items() if each.name in fitted.key}, block.num_rows
    ):
        reasons.add(reason, where & stays)
    # A column outside the key never rejects a delete: sinks use its value only if the source sends old rows.
    for reason, where in _faults(
        {each: found for each, found in made.items() if each.name not in fitted.key}, block.num_rows
    ):
        reasons.add(reason, where & stays & ~bare)
    for reason, where in computed_faults(fitted, block, answers):
        reasons.add(reason, where & stays & ~bare)
    return _Judged(block, made, reasons, bare, goes, ~stays & ~goes & ~reasons.given)


def _spread(orphans: Bools, judged: Sequence[_Judged]) -> None:
    at = 0
    for each in judged:
        count = each.block.num_rows
        each.reasons.add(
            _ORPHAN,
            orphans[at : at + count] & ~each.goes & ~each.left_out & ~is_kind(each.block, ChangeType.DELETE),
        )
        at += count


def _kept(fitted: Fitted, judged: _Judged, schema: pa.Schema) -> pa.Table:
    block, goes = judged.block, judged.goes
    made = {
        each: found
        if each.name in fitted.key
        else _without(found, goes | _valueless(each, found, judged.bare))
        for each, found in judged.made.items()
    }
    metadata = {field.name: block.column(field.name) for field in METADATA_FIELDS}
    if goes.any():
        metadata[CHANGE_TYPE] = pc.if_else(
            _flags(goes), ChangeType.DELETE.value, metadata[CHANGE_TYPE].combine_chunks()
        )
        metadata[UNCHANGED] = _nulled(metadata[UNCHANGED].combine_chunks(), goes)
    metadata[UNCHANGED] = target_lists(_chunked(metadata[UNCHANGED]), fitted.names)
    metadata[EXACT] = _exact(made, block.num_rows)
    columns = [*(each.values for each in made.values()), *metadata.values()]
    return pa.table(columns, schema=schema).filter(_flags(~judged.left_out & ~judged.reasons.given))


def _make(
    columns: Sequence[TargetColumn], block: pa.Table, answers: Answers | None = None
) -> dict[TargetColumn, Made]:
    return {each: _made(each, block, answers) for each in columns}


def _made(column: TargetColumn, block: pa.Table, answers: Answers | None) -> Made:
    if isinstance(column, MadeColumn):
        return column.make(given_values(block, column.source.name))
    assert answers is not None, "Spark was asked before"
    return Made(answers.column(column)[0])


def _faults(made: dict[TargetColumn, Made], count: int) -> list[tuple[str, Bools]]:
    return faults({each: found for each, found in made.items() if isinstance(each, MadeColumn)}, count)[1]


def _exact(made: Mapping[TargetColumn, Made], count: int) -> pa.Array:
    return build_exact(
        {each.name: _chunked(found.texts) for each, found in made.items() if found.texts is not None}, count
    )


def _valueless(column: TargetColumn, made: Made, bare: Bools) -> Bools:
    """Mask of the rows in `bare` for which the column has no value."""
    if isinstance(column, Computed):
        return bare
    return np.zeros_like(bare) if made.failed is None else bare & made.failed


def _without(made: Made, rows: Bools) -> Made:
    if not rows.any():
        return made
    return Made(
        _nulled(made.values, rows), None if made.texts is None else _nulled(made.texts, rows), made.failed
    )


def _nulled(values: pa.Array, rows: Bools) -> pa.Array:
    places = pa.Array.from_buffers(pa.int64(), len(rows), [bitmap(~rows), pa.py_buffer(np.arange(len(rows)))])
    return values.take(places)


def _blocks(table: pa.Table) -> Iterator[pa.Table]:
    for batch in table.to_batches(max_chunksize=_BLOCK_ROWS):
        yield pa.Table.from_batches([batch])


def _answered(table: pa.Table, answers: Answers | None) -> Iterator[tuple[pa.Table, Answers | None]]:
    at = 0
    for block in _blocks(table):
        yield block, None if answers is None else answers.slice(at, block.num_rows)
        at += block.num_rows


def _joined(tables: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
    return pa.concat_tables([schema.empty_table(), *tables])


def _refused_schema(schema: pa.Schema) -> pa.Schema:
    return schema.append(pa.field(REASON, pa.string()))


def _chunked(column: pa.Array | pa.ChunkedArray) -> pa.ChunkedArray:
    return column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])


def _flags(values: Bools) -> pa.Array:
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, bitmap(values)])
