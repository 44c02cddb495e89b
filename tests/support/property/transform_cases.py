"""Transforms and the rows that a plain model expects of them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

import pyarrow as pa
from typing_extensions import override

from penstock.change import EXACT
from penstock.schema import Column, TableSchema
from penstock.secret import Secret
from penstock.transforms.columns import Mask
from penstock.transforms.transform import Transform
from tests.support.property.histories import Sizes
from tests.support.property.source_model import Record, SourceModel, record_of
from tests.support.sinks.history import BEYOND, PLAIN, History
from tests.support.sinks.source import NULL, Row, Value, exact_of, own_arrays

KEY = Secret("a key for tests")


def hashed(text: str) -> str:
    return hmac.new(KEY.reveal().encode(), text.encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Case:
    """A transform, and its result in plain Python: the target's row, or None for one that is left out."""

    table: TableSchema
    transform: Transform
    model: Callable[[Row], Row | None]


def shaped(row: Row) -> Row:
    number = row["id"].typed
    note = row["note"].typed
    assert number is not None
    return {
        "id": Value(hashed(str(number))),
        "remark": NULL if note is None else Value(f"{str(note)[:1]}***" if len(str(note)) > 1 else "***"),
        "amount": row["amount"],
        "seen": row["seen"],
    }


def filtered(row: Row) -> Row | None:
    """Rows whose number is in a range, or whose note is not too late in the alphabet."""
    note = row["note"].typed
    number = row["id"].typed
    assert isinstance(number, int)
    return dict(row) if number > -48 and (note is None or str(note) < "text 5") else None


def hashed_beyond(row: Row) -> Row:
    """Keys that are distinguished by their texts only."""
    day, number = row["valid_to"], row["number"]
    text = (
        number.text
        if number.text is not None
        else str(int(number.typed))
        if isinstance(number.typed, Decimal)
        else None
    )
    return {
        **row,
        "number": NULL if text is None else Value(hashed(text)),
        "valid_to": Value(hashed(day.text or str(day.typed))),
    }


CASES = {
    "columns": Case(
        PLAIN, Transform(("blob",), {"note": "remark"}, ("id",), {"note": Mask(1)}, key=KEY), shaped
    ),
    "where": Case(PLAIN, Transform(where="id > -48 AND (note IS NULL OR note < 'text 5')"), filtered),
    "beyond": Case(BEYOND, Transform(hash=("valid_to", "number"), key=KEY), hashed_beyond),
}


class TextsSentHistory(History):
    """A history in which texts are always sent, so that the filter can be evaluated."""

    @staticmethod
    @override
    def may_stay(column: Column) -> bool:
        return not pa.types.is_string(column.arrow_type) and not pa.types.is_timestamp(column.arrow_type)


class AllSentHistory(TextsSentHistory):
    @staticmethod
    @override
    def may_stay(column: Column) -> bool:
        return False


def source_of(sizes: Sizes, kind: type[History]) -> SourceModel:
    history = kind(PLAIN, sizes.seed, groups=2, source=SourceModel)
    history.statements = sizes.statements
    history.run(sizes.transactions, truncates=sizes.truncates)
    assert isinstance(history.source, SourceModel)
    return history.source


def wanted(case: Case, rows: list[Row]) -> list[Record]:
    return [record_of(made) for row in rows if (made := case.model(row)) is not None]


def snapshot(table: TableSchema, rows: list[Row]) -> pa.Table:
    columns = [pa.field(column.name, column.arrow_type) for column in table.columns]
    exact = pa.array([exact_of(row) for row in rows], pa.map_(pa.string(), pa.string()))
    return pa.table(
        [*own_arrays(table, rows), exact], schema=pa.schema([*columns, pa.field(EXACT, exact.type)])
    )
