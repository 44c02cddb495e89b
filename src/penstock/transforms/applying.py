"""Rows and changes of the source, made into the target's. Pure; runs where the rows are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import CHANGE_TYPE, EXACT, EXACT_TYPE, METADATA_FIELDS, UNCHANGED, ChangeCounts, ChangeType
from penstock.postgres.types.arrays import Bools, as_bools, bitmap
from penstock.sinks.keys import exact_texts
from penstock.sinks.lives import is_kind, unchanged_rows
from penstock.sinks.values import build_exact
from penstock.sinks.views import renamed_lists
from penstock.transforms.columns import Given, Made, MadeColumn, faults, read_texts
from penstock.transforms.condition import Values, Verdict
from penstock.transforms.filling import Filled, fill
from penstock.transforms.outcome import REASON, Outcome
from penstock.transforms.texts import is_text_form
from penstock.transforms.transform import Fitted

_BLOCK_ROWS = 65_536
_UNKNOWN = "the filter depends on a value that is not there; with REPLICA IDENTITY FULL every change has all values"
_ORPHAN = "the row came into the filter without a value that only the target could have; with REPLICA IDENTITY FULL every change has all"


def transform_rows(fitted: Fitted, rows: pa.Table) -> Outcome:
    """Rows of the source as a snapshot reads them: its columns, and `_exact`."""
    schema = pa.schema([*fitted.arrow_schema, pa.field(EXACT, EXACT_TYPE)])
    kept, refused = [], []
    for block in _blocks(rows):
        verdict = _verdict(fitted, block)
        made = _make(fitted.made, block)
        reasons = _Reasons(block.num_rows)
        reasons.add(_UNKNOWN, verdict.missing)
        _, found = faults(made, block.num_rows)
        for reason, where in found:
            reasons.add(reason, where & verdict.yes)
        columns = [*(each.values for each in made.values()), _exact(made, block.num_rows)]
        kept.append(pa.table(columns, schema=schema).filter(_flags(verdict.yes & ~reasons.given)))
        refused.append(reasons.refused(block))
    return Outcome(_joined(kept, schema), _joined(refused, _refused_schema(rows.schema)))


def transform_changes(fitted: Fitted, changes: pa.Table) -> Outcome:
    """Changes of the source in the order of the log, its columns and then `METADATA_FIELDS`.

    All of an epoch at once, if there is a filter and some of them lack values.
    """
    filled: Filled | None = None
    source = changes
    if fitted.is_filter and fitted.source.key and changes.column(UNCHANGED).null_count < changes.num_rows:
        filled = fill(changes, fitted.source.key)
        changes = filled.changes
    metadata = [pa.field(field.name, field.type) for field in METADATA_FIELDS]
    schema = pa.schema([*fitted.arrow_schema, *metadata])
    judged = [_judge(fitted, block) for block in _blocks(changes)]
    if filled is not None:
        _spread(filled.orphans(np.concatenate([each.left_out for each in judged])), judged)
    kept = [_kept(fitted, each, schema) for each in judged]
    refused = [each.reasons.refused(block) for each, block in zip(judged, _blocks(source), strict=True)]
    return Outcome(_joined(kept, schema), _joined(refused, _refused_schema(changes.schema)))


def transform_keys(fitted: Fitted, keys: pa.Table) -> pa.Table:
    """Keys of the source, its key's columns and `_exact`, as the target has them."""
    columns = [each for each in fitted.made if each.source.name in fitted.source.key]
    made = _make(columns, keys.combine_chunks())
    values = {each.name: made[each].values for each in columns}
    return pa.table({**values, EXACT: _exact(made, keys.num_rows)})


def count_changes(changes: pa.Table, moves: int) -> ChangeCounts:
    """What `changes` hold; `moves` of them at most."""
    kinds = {kind: int(is_kind(changes, kind).sum()) for kind in ChangeType}
    return ChangeCounts(
        inserts=kinds[ChangeType.INSERT],
        updates=kinds[ChangeType.UPDATE_POSTIMAGE],
        deletes=kinds[ChangeType.DELETE],
        truncates=kinds[ChangeType.TRUNCATE],
        moves=min(moves, kinds[ChangeType.DELETE], kinds[ChangeType.INSERT]),
        unchanged=changes.num_rows - changes.column(UNCHANGED).null_count,
        inexact=changes.num_rows - changes.column(EXACT).null_count,
    )


class _Reasons:
    """Why rows are refused; of several reasons the first counts."""

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
    """A block of changes, and what becomes of each."""

    block: pa.Table
    made: dict[MadeColumn, Made]
    reasons: _Reasons
    goes: Bools
    """Those that become deletes of their key."""
    left_out: Bools


def _judge(fitted: Fitted, block: pa.Table) -> _Judged:
    verdict, reasons = _verdict(fitted, block), _Reasons(block.num_rows)
    deleted, truncated, inserted = (is_kind(block, kind) for kind in (ChangeType.DELETE, ChangeType.TRUNCATE, ChangeType.INSERT))
    # Without a key, a delete shows the whole row, and goes where that row has gone.
    free = truncated | deleted if fitted.source.key else truncated
    reasons.add(_UNKNOWN, verdict.missing & ~free)
    stays = verdict.yes | free
    goes = ~stays & ~inserted & ~deleted & ~reasons.given if fitted.source.key else np.zeros_like(stays)
    made = _make(fitted.made, block)
    _, found = faults(made, block.num_rows)
    for reason, where in found:
        reasons.add(reason, where & stays)
    return _Judged(block, made, reasons, goes, ~stays & ~goes & ~reasons.given)


def _spread(orphans: Bools, judged: Sequence[_Judged]) -> None:
    at = 0
    for each in judged:
        count = each.block.num_rows
        each.reasons.add(_ORPHAN, orphans[at : at + count] & ~each.goes & ~each.left_out & ~is_kind(each.block, ChangeType.DELETE))
        at += count


def _kept(fitted: Fitted, judged: _Judged, schema: pa.Schema) -> pa.Table:
    block, goes = judged.block, judged.goes
    made = {each: _without(found, goes) if each.name not in fitted.key else found for each, found in judged.made.items()}
    metadata = {field.name: block.column(field.name) for field in METADATA_FIELDS}
    if goes.any():
        metadata[CHANGE_TYPE] = pc.if_else(_flags(goes), ChangeType.DELETE.value, metadata[CHANGE_TYPE].combine_chunks())
        metadata[UNCHANGED] = _nulled(metadata[UNCHANGED].combine_chunks(), goes)
    metadata[UNCHANGED] = renamed_lists(_chunked(metadata[UNCHANGED]), fitted.names)
    metadata[EXACT] = _exact(made, block.num_rows)
    columns = [*(each.values for each in made.values()), *metadata.values()]
    return pa.table(columns, schema=schema).filter(_flags(~judged.left_out & ~judged.reasons.given))


def _verdict(fitted: Fitted, block: pa.Table) -> Verdict:
    count = block.num_rows
    if fitted.condition is None:
        return Verdict(np.ones(count, np.bool_), np.zeros(count, np.bool_), np.zeros(count, np.bool_))
    columns: dict[str, pa.Array] = {}
    missing: dict[str, Bools] = {}
    unchanged = unchanged_rows(block.column(UNCHANGED)) if UNCHANGED in block.column_names else {}
    for column in fitted.asked:
        given = _given(block, column.name)
        if is_text_form(column):
            given = read_texts(given.values, column)
        columns[column.name] = given.values
        absent = np.zeros(count, np.bool_) if given.texts is None else as_bools(given.texts.is_valid())
        if column.name in unchanged:
            absent[unchanged[column.name]] = True
        missing[column.name] = absent
    return fitted.condition.judge(Values(columns, missing, count))


def _make(columns: Sequence[MadeColumn], block: pa.Table) -> dict[MadeColumn, Made]:
    return {each: each.make(_given(block, each.source.name)) for each in columns}


def _given(block: pa.Table, name: str) -> Given:
    texts = exact_texts(block.column(EXACT), name)
    return Given(_whole(block.column(name)), None if texts is None else _whole(texts))


def _exact(made: dict[MadeColumn, Made], count: int) -> pa.Array:
    return build_exact({each.name: _chunked(found.texts) for each, found in made.items() if found.texts is not None}, count)


def _without(made: Made, rows: Bools) -> Made:
    if not rows.any():
        return made
    return Made(_nulled(made.values, rows), None if made.texts is None else _nulled(made.texts, rows), made.failed)


def _nulled(values: pa.Array, rows: Bools) -> pa.Array:
    places = pa.Array.from_buffers(pa.int64(), len(rows), [bitmap(~rows), pa.py_buffer(np.arange(len(rows)))])
    return values.take(places)


def _blocks(table: pa.Table) -> Iterator[pa.Table]:
    for batch in table.to_batches(max_chunksize=_BLOCK_ROWS):
        yield pa.Table.from_batches([batch])


def _joined(tables: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
    return pa.concat_tables([schema.empty_table(), *tables])


def _refused_schema(schema: pa.Schema) -> pa.Schema:
    return schema.append(pa.field(REASON, pa.string()))


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _chunked(column: pa.Array | pa.ChunkedArray) -> pa.ChunkedArray:
    return column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])


def _flags(values: Bools) -> pa.Array:
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, bitmap(values)])
