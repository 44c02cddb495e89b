"""Values as the source gave them: as they travelled, and typed; and which of them are not there."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from penstock.change import EXACT, UNCHANGED
from penstock.postgres.types.arrays import Bools, as_bools
from penstock.schema import Column
from penstock.sinks.keys import exact_texts
from penstock.sinks.lives import unchanged_rows
from penstock.transforms.columns import Given, read_texts
from penstock.transforms.texts import is_text_form


def given_values(rows: pa.Table, name: str) -> Given:
    texts = exact_texts(rows.column(EXACT), name)
    return Given(whole(rows.column(name)), None if texts is None else whole(texts))


def typed_values(rows: pa.Table, column: Column) -> Given:
    """In the type that they stand for, also where they are the source's own text."""
    given = given_values(rows, column.name)
    return read_texts(given.values, column) if is_text_form(column) else given


def inexact(given: Given) -> Bools:
    """Which values their type cannot hold."""
    return np.zeros(len(given.values), np.bool_) if given.texts is None else as_bools(given.texts.is_valid())


class Absences:
    """Which values of some rows did not travel."""

    def __init__(self, rows: pa.Table) -> None:
        self._count = rows.num_rows
        self._rows = unchanged_rows(rows.column(UNCHANGED)) if UNCHANGED in rows.column_names else {}

    def of(self, name: str) -> Bools:
        found = np.zeros(self._count, np.bool_)
        if name in self._rows:
            found[self._rows[name]] = True
        return found


def whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
