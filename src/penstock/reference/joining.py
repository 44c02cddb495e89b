"""What `enrich` does to a batch of changes: the rows of a reference table beside them.

Pure but for the finder. A change that takes rows away is passed on as it is: there is nothing left to enrich. The order and the number of
rows never change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import CHANGE_TYPE, EXACT, UNCHANGED, ChangeType
from penstock.errors import ReferenceTableError
from penstock.reference.finding import Asked, Found, ReferenceFinder
from penstock.reference.keys import key_values
from penstock.worker import settle_worker

_GOING = pa.array([ChangeType.DELETE.value, ChangeType.TRUNCATE.value])


@dataclass(frozen=True, slots=True)
class Enrichment:
    """One join, as it travels to the executors."""

    finder: ReferenceFinder
    on: tuple[tuple[str, str], ...]
    """Columns of the stream and of the reference table's key, in the order of the key."""
    columns: tuple[tuple[str, str], ...]
    """Columns of the reference table, and what they are called beside those of the stream."""
    types: Mapping[str, pa.DataType]
    """Of the latter, as Spark wants them."""
    matched: str | None
    """The column that says whether a row was found; None if nobody wants to know."""
    version: str | None
    """The column that says as of when; None for now."""

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """In a task: `mapInArrow` calls it once for each."""
        settle_worker()
        return map(self.join, batches)

    def join(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        asked = self._asked(batch)
        found = self.finder.find(asked)
        arrays = list(batch.columns)
        names = list(batch.schema.names)
        exact = _exact_of(batch)
        if exact is not None:
            arrays[names.index(EXACT)] = self._exact(exact, found)
        for name, shown in self.columns:
            column = _whole(found.rows.column(name))
            arrays.append(column if column.type == self.types[shown] else column.cast(self.types[shown]))
            names.append(shown)
        if self.matched is not None:
            arrays.append(found.is_match)
            names.append(self.matched)
        return pa.RecordBatch.from_arrays(arrays, names)

    def _asked(self, batch: pa.RecordBatch) -> Asked:
        names = [name for name, _ in self.on]
        columns = [batch.column(name) for name in names]
        keys = key_values(columns, names, _exact_of(batch))
        if CHANGE_TYPE in batch.schema.names:
            going = pc.is_in(batch.column(CHANGE_TYPE), _GOING).to_pylist()
            keys = [None if goes else key for key, goes in zip(keys, going, strict=True)]
        if UNCHANGED in batch.schema.names:
            _check_known(batch.column(UNCHANGED), names)
        return Asked(keys, columns, self._versions(batch))

    def _versions(self, batch: pa.RecordBatch) -> list[int] | None:
        if self.version is None:
            return None
        versions = batch.column(self.version)
        if versions.null_count:
            raise ReferenceTableError(
                f"a row has no {self.version}, so it is not known as of when it is to be joined",
                hint="rows of spark.read have no position; read the table as a stream",
            )
        return list(versions.to_pylist())

    def _exact(self, exact: pa.Array, found: Found) -> pa.Array:
        """The texts of the row itself, and those of what was found for it, under the names that the columns have here."""
        texts = _whole(found.rows.column(EXACT))
        if texts.null_count == len(texts):
            return exact
        shown = dict(self.columns)
        merged = [_merged(own, others, shown) for own, others in zip(exact.to_pylist(), texts.to_pylist(), strict=True)]
        return pa.array(merged, exact.type)


def _exact_of(batch: pa.RecordBatch) -> pa.Array | None:
    """The metadata column, unless the stream has something else under its name."""
    column = batch.column(EXACT) if EXACT in batch.schema.names else None
    return column if column is not None and pa.types.is_map(column.type) else None


def _merged(own: list[Any] | None, others: list[Any] | None, shown: Mapping[str, str]) -> list[Any] | None:
    added = [(shown[name], text) for name, text in others or () if name in shown]
    return [*(own or ()), *added] or None


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)


def _check_known(unchanged: pa.Array, names: list[str]) -> None:
    """A value that did not travel cannot be looked up, and is not null."""
    if unchanged.null_count == len(unchanged):
        return
    for columns in unchanged.drop_null().to_pylist():
        hidden = next((name for name in names if name in columns), None)
        if hidden is not None:
            raise ReferenceTableError(
                f"a change does not say what its column {hidden!r} holds, since that is large and stayed as it was",
                hint="ALTER TABLE … REPLICA IDENTITY FULL; for the table of the stream, or join on a column of another type",
            )
