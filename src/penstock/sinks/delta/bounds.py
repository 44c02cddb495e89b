"""Which files of a Delta table can hold a key, by the least and greatest values that the log has of them.

The log cuts long texts off and rounds times down, other writers have their own ways with numbers, and some values have no order that all
agree on. So only whole numbers, dates, times and texts are compared, with room to spare, and whatever cannot be compared may be there.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

Bound: TypeAlias = int | str | None
"""None: it may be anything."""
Bounds: TypeAlias = tuple[tuple[Bound, Bound], ...]
"""Least and greatest value for each column of the key. Travels to the executors."""

_MANY = 10_000
_CUT_OFF = 32
"""Texts that are so long may have been cut off."""
_ROUNDED_US = 60_001_000
"""Statistics have milliseconds, and zones of former centuries, which Spark may write, lose their seconds."""
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@lru_cache(maxsize=1 << 15)
def load_bounds(stats: str | None, fields: tuple[pa.Field, ...]) -> Bounds:
    """What the statistics of one file say about `fields`, which have the names that the files carry."""
    try:
        found = json.loads(stats) if stats else {}
        low, high = found.get("minValues") or {}, found.get("maxValues") or {}
        return tuple((_low(low.get(field.name), field.type), _high(high.get(field.name), field.type)) for field in fields)
    except (ValueError, AttributeError):
        return ((None, None),) * len(fields)


def _low(value: Any, kind: pa.DataType) -> Bound:
    bound = _bound(value, kind)
    return bound - _ROUNDED_US if isinstance(bound, int) and pa.types.is_timestamp(kind) else bound


def _high(value: Any, kind: pa.DataType) -> Bound:
    bound = _bound(value, kind)
    if isinstance(bound, str) and len(bound) >= _CUT_OFF:
        return None
    return bound + _ROUNDED_US if isinstance(bound, int) and pa.types.is_timestamp(kind) else bound


def _bound(value: Any, kind: pa.DataType) -> Bound:
    """As `probes` has values of this type."""
    if pa.types.is_integer(kind):
        return value if type(value) is int else None
    if not isinstance(value, str):
        return None
    if pa.types.is_string(kind):
        return value
    try:
        if pa.types.is_date(kind):
            return date.fromisoformat(value).toordinal() - _EPOCH_DAY
        if pa.types.is_timestamp(kind):
            return _microseconds(datetime.fromisoformat(value), is_zoned=kind.tz is not None)
    except ValueError:  # a year that Python does not have
        return None
    return None


def _microseconds(moment: datetime, *, is_zoned: bool) -> int | None:
    if moment.tzinfo is None and is_zoned:
        return None
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)


class Probes:
    """Keys, as they are compared with bounds."""

    def __init__(self, keys: pa.Table, names: Sequence[str]) -> None:
        self._columns = [_probes(keys.column(name)) for name in names]

    def may_be_within(self, bounds: Bounds) -> bool:
        return all(values is None or _meets(values, *bound) for values, bound in zip(self._columns, bounds, strict=True))


def _probes(column: pa.ChunkedArray) -> list[Any] | None:
    """The values in order, or of very many the least and the greatest; None if they cannot be compared."""
    kind = column.type
    if column.null_count:
        return None
    if pa.types.is_date32(kind):
        column = column.cast(pa.int32())
    elif pa.types.is_timestamp(kind) and kind.unit == "us":
        column = column.cast(pa.int64())
    elif not (pa.types.is_integer(kind) or pa.types.is_string(kind)):
        return None
    if len(column) > _MANY:
        ends = pc.min_max(column).as_py()
        return [ends["min"], None, ends["max"]]
    return sorted(column.to_pylist())


def _meets(values: list[Any], low: Bound, high: Bound) -> bool:
    """Whether one of the values can lie between the two."""
    if not values:
        return False
    if len(values) == 3 and values[1] is None:
        return (low is None or values[2] >= low) and (high is None or values[0] <= high)
    at = 0 if low is None else bisect_left(values, low)
    return at < len(values) and (high is None or values[at] <= high)
