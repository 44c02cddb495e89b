"""What a table of the target looks like: the source's columns, and what its mode adds to them.

| mode | a row of the target is | added |
|---|---|---|
| `mirror` | a row of the source | |
| `soft_delete` | the last state of a row that the source has or had | `_deleted`, `_deleted_at` |
| `history` | a row of the source as it was from one commit to another; one version for each key and commit | `_valid_from` to `_current` |
| `append` | a change | what every change carries |

Every row also has `_exact`: the exact texts of values that the typed columns cannot hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import pyarrow as pa

from penstock.change import (
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    EXACT,
    EXACT_TYPE,
    METADATA_FIELDS,
    ORDINAL,
    UNCHANGED,
    XID,
    ChangeType,
)
from penstock.errors import SinkRefusedError
from penstock.position import Position

DELETED = "_deleted"
DELETED_AT = "_deleted_at"
VALID_FROM = "_valid_from"
VALID_FROM_TIME = "_valid_from_time"
VALID_TO = "_valid_to"
VALID_TO_TIME = "_valid_to_time"
CURRENT = "_current"

_TIME = pa.timestamp("us", "UTC")
_EXACT_FIELD = pa.field(EXACT, EXACT_TYPE)


class Mode(StrEnum):
    MIRROR = "mirror"
    SOFT_DELETE = "soft_delete"
    HISTORY = "history"
    APPEND = "append"


_ADDED: Mapping[Mode, tuple[pa.Field, ...]] = {
    Mode.MIRROR: (_EXACT_FIELD,),
    Mode.SOFT_DELETE: (pa.field(DELETED, pa.bool_()), pa.field(DELETED_AT, _TIME), _EXACT_FIELD),
    Mode.HISTORY: (
        pa.field(VALID_FROM, pa.int64()),
        pa.field(VALID_FROM_TIME, _TIME),
        pa.field(VALID_TO, pa.int64()),
        pa.field(VALID_TO_TIME, _TIME),
        pa.field(CURRENT, pa.bool_()),
        _EXACT_FIELD,
    ),
    Mode.APPEND: tuple(pa.field(field.name, field.type) for field in METADATA_FIELDS),
}


def known_columns(layout: Layout, asked: Sequence[str]) -> list[str]:
    """The columns by which rows of the target are told apart, and those of a lookup; without a key all of them."""
    known = {*layout.identity, *asked, *added_names(layout.mode)} if layout.key else set(layout.schema.names)
    return [name for name in layout.schema.names if name in known]


def added_names(mode: Mode) -> frozenset[str]:
    """The columns that a mode adds to the source's, `_exact` among them."""
    return frozenset(field.name for field in _ADDED[mode])


@dataclass(frozen=True, slots=True)
class Layout:
    """Travels to the executors."""

    columns: pa.Schema
    """The source's columns, with the types that they have in the target."""
    key: tuple[str, ...]
    mode: Mode

    def __post_init__(self) -> None:
        taken = [field.name for field in _ADDED[self.mode] if field.name in self.columns.names]
        if taken:
            raise SinkRefusedError(
                f"the table has a column named {taken[0]!r}, a name that the mode {self.mode} needs for itself",
                hint="rename the column, or choose another mode",
            )
        if not self.key and self.mode in (Mode.SOFT_DELETE, Mode.HISTORY):
            raise SinkRefusedError(
                f"a table without a key cannot be kept as {self.mode}: nothing tells which row became which",
                hint="give the table a primary key, or choose the mode append or mirror",
            )

    @property
    def schema(self) -> pa.Schema:
        """Of the whole target: `columns`, what the mode adds, `_exact`. Every field is nullable."""
        return pa.schema([*self.columns, *_ADDED[self.mode]])

    @property
    def identity(self) -> tuple[str, ...]:
        """What names one row of the target; empty if nothing does."""
        if self.mode is Mode.APPEND:
            return ()
        return (*self.key, VALID_FROM) if self.mode is Mode.HISTORY else self.key

    def snapshot_values(self, fence: Position, time: datetime) -> dict[str, object]:
        """What a snapshot's rows have in the columns that the mode adds, `_exact` aside; `time` is when the fence was."""
        if self.mode is Mode.SOFT_DELETE:
            return {DELETED: False, DELETED_AT: None}
        if self.mode is Mode.HISTORY:
            return {VALID_FROM: fence.value, VALID_FROM_TIME: time, VALID_TO: None, VALID_TO_TIME: None, CURRENT: True}
        if self.mode is Mode.APPEND:
            known = {CHANGE_TYPE: ChangeType.SNAPSHOT.value, COMMIT_VERSION: fence.value, COMMIT_TIMESTAMP: time}
            return {**known, ORDINAL: 0, XID: 0, UNCHANGED: None}
        return {}
