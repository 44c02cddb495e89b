"""Which rows pass the filter, and of which that cannot be told, or not what they would be."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from penstock.postgres.types.arrays import Bools
from penstock.transforms.asking import Answers
from penstock.transforms.condition import Values, Verdict
from penstock.transforms.given import Absences, inexact, typed_values
from penstock.transforms.transform import Fitted

Doubts = list[tuple[str, Bools]]
"""Reasons to refuse rows, and which rows."""

_FULL = "with REPLICA IDENTITY FULL every change has all values"
_UNKNOWN = f"the filter depends on a value that is not there; {_FULL}"
_ERROR = "Spark met an error, such as a text that is no number, a number too large or a division by zero"


def judge(fitted: Fitted, block: pa.Table, answers: Answers | None = None) -> tuple[Verdict, Doubts]:
    """What the filter says of rows, and why it cannot say it of some."""
    if not fitted.is_filter:
        everything = np.ones(block.num_rows, np.bool_)
        return Verdict(everything, ~everything, ~everything), []
    absences = Absences(block)
    columns: dict[str, pa.Array] = {}
    missing: dict[str, Bools] = {}
    for column in fitted.asked:
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
    verdict = Verdict.of(values, unknown | failed)
    return verdict, [(_UNKNOWN, unknown), (f"the filter cannot be worked out: {_ERROR}", failed)]


def computed_faults(fitted: Fitted, block: pa.Table, answers: Answers | None) -> Iterator[tuple[str, Bools]]:
    """Why columns that Spark works out cannot be had in some rows. One that is made of a single column is unchanged where that is."""
    if answers is None or not fitted.computed:
        return
    absences = Absences(block)
    beyond = {column.name: inexact(typed_values(block, column)) for column in fitted.questioned}
    for each in fitted.computed:
        unchanged, unheld = _any(block, [absences.of(name) for name in each.needs]), _any(block, [beyond[name] for name in each.needs])
        _, failed = answers.column(each)
        if len(each.needs) > 1:
            yield f"column {each.name!r} depends on a value that is not there; {_FULL}", unchanged
        yield f"column {each.name!r} depends on a value that is beyond its type", unheld & ~unchanged
        yield f"column {each.name!r} cannot be worked out: {_ERROR}", failed & ~unchanged


def _any(block: pa.Table, found: list[Bools]) -> Bools:
    return np.asarray(np.any([np.zeros(block.num_rows, np.bool_), *found], axis=0), np.bool_)
