"""Table modes and layouts: which rows and columns a target has, and how its epochs are applied.

| mode | a row of the target is | added columns |
|---|---|---|
| `mirror` | a row of the source | |
| `soft_delete` | the last state of a row that the source has or had | `_deleted`, `_deleted_at` |
| `history` | a row of the source as it was from one commit to another | `_valid_from` to `_current` |
| `append` | a change | the metadata of the change |

In `history`, there is one version for each key and commit. Every row also has `_exact`: the exact texts of
values that the typed columns cannot hold.

Other modules ask a mode for a property and do not compare modes. The reduction of an epoch for each mode is
in `fold.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple, Self

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
    ChangeCounts,
    ChangeType,
)
from penstock.errors import SinkRefusedError
from penstock.position import Position
from penstock.schema import TableName

DELETED = "_deleted"
DELETED_AT = "_deleted_at"
VALID_FROM = "_valid_from"
VALID_FROM_TIME = "_valid_from_time"
VALID_TO = "_valid_to"
VALID_TO_TIME = "_valid_to_time"
CURRENT = "_current"

_TIME = pa.timestamp("us", "UTC")
_EXACT_FIELD = pa.field(EXACT, EXACT_TYPE)
_ADDED_COLUMNS = {
    "mirror": (_EXACT_FIELD,),
    "soft_delete": (pa.field(DELETED, pa.bool_()), pa.field(DELETED_AT, _TIME), _EXACT_FIELD),
    "history": (
        pa.field(VALID_FROM, pa.int64()),
        pa.field(VALID_FROM_TIME, _TIME),
        pa.field(VALID_TO, pa.int64()),
        pa.field(VALID_TO_TIME, _TIME),
        pa.field(CURRENT, pa.bool_()),
        _EXACT_FIELD,
    ),
    "append": tuple(pa.field(field.name, field.type) for field in METADATA_FIELDS),
}


class Flag(NamedTuple):
    """A boolean column, and the value that selects the flagged rows."""

    column: str
    value: bool


class Mode(StrEnum):
    MIRROR = "mirror"
    SOFT_DELETE = "soft_delete"
    HISTORY = "history"
    APPEND = "append"

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """Parse the mode that a target stores.

        Penstock versions before table modes existed stored none, so a target without a mode is a mirror.
        """
        return cls("mirror" if text is None else text)

    @property
    def added_columns(self) -> tuple[pa.Field, ...]:
        """The columns that this mode adds after the source's columns, including `_exact`."""
        return _ADDED_COLUMNS[self.value]

    @property
    def added_names(self) -> frozenset[str]:
        return frozenset(field.name for field in self.added_columns)

    @property
    def adds_columns(self) -> bool:
        """Whether this mode adds any column besides `_exact`.

        If it does, the Postgres sink cannot adopt a table with this mode, and Spark's MERGE cannot write a
        Delta table with it.
        """
        return self.added_columns != (_EXACT_FIELD,)

    @property
    def is_log(self) -> bool:
        """Whether each change becomes one row of the target.

        Epochs then only add rows, and no column or key identifies a row.
        """
        return self is Mode.APPEND

    @property
    def keeps_past_rows(self) -> bool:
        """Whether the target keeps rows that the source has deleted or updated. If so, an epoch has to look
        up the rows that it changes.
        """
        return self in (Mode.SOFT_DELETE, Mode.HISTORY)

    @property
    def can_resync(self) -> bool:
        """Whether a resync loses no row of the target. Targets of other modes have rows that the source no
        longer has.
        """
        return self is Mode.MIRROR

    @property
    def live_flag(self) -> Flag | None:
        """The flag of the rows that the source has now; None if the mode adds no such flag.

        If it is None, `verify` compares all rows with the source, except in an append table.
        """
        return Flag(DELETED, False) if self is Mode.SOFT_DELETE else self.current_flag

    @property
    def current_flag(self) -> Flag | None:
        """The flag of the newest version of a row; None if the target has one row for each key."""
        return Flag(CURRENT, True) if self is Mode.HISTORY else None

    def needs_key(self, *, has_old_rows: bool) -> bool:
        """Whether a table must have a key. `has_old_rows`: updates and deletes carry the whole old row."""
        return self.keeps_past_rows or (self is Mode.MIRROR and not has_old_rows)

    def identity(self, key: tuple[str, ...]) -> tuple[str, ...]:
        """The columns that identify one row of the target; empty if there are none."""
        if self.is_log:
            return ()
        return (*key, VALID_FROM) if self is Mode.HISTORY else key

    def adds_only(self, counts: ChangeCounts) -> bool:
        """Whether these changes only add rows to the target, one row for each change. Delta and Iceberg then
        write the changes as they are, without the reduction of the mode in `fold.py`.

        Inserts into a mirror conflict with no row: right before the insert, the mirror equals the source,
        whose keys are unique.
        """
        if self is Mode.MIRROR:
            return not (counts.updates or counts.deletes or counts.moves or counts.truncates)
        return self.is_log

    def snapshot_values(self, fence: Position, time: datetime) -> dict[str, object]:
        """The values that the rows of a snapshot have in the added columns, except in `_exact`. `time` is the
        time of the fence.
        """
        if self is Mode.SOFT_DELETE:
            return {DELETED: False, DELETED_AT: None}
        if self is Mode.HISTORY:
            return {
                VALID_FROM: fence.value,
                VALID_FROM_TIME: time,
                VALID_TO: None,
                VALID_TO_TIME: None,
                CURRENT: True,
            }
        if self is Mode.APPEND:
            known = {
                CHANGE_TYPE: ChangeType.SNAPSHOT.value,
                COMMIT_VERSION: fence.value,
                COMMIT_TIMESTAMP: time,
            }
            return {**known, ORDINAL: 0, XID: 0, UNCHANGED: None}
        return {}


ModeOf = Callable[[TableName], Mode]
"""The configured mode of each table."""


def mirrored(_: TableName) -> Mode:
    """A `ModeOf` for pipelines whose tables are all mirrors."""
    return Mode.MIRROR


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a target table: the source's columns, and the columns that its mode adds. Sent to
    executors.
    """

    columns: pa.Schema
    """The source's columns, with the types that they have in the target."""
    key: tuple[str, ...]
    mode: Mode

    def __post_init__(self) -> None:
        taken = [field.name for field in self.mode.added_columns if field.name in self.columns.names]
        if taken:
            raise SinkRefusedError(
                f"the table has a column named {taken[0]!r}, a name that the mode {self.mode} reserves",
                hint="rename the column, or choose another mode",
            )
        if not self.key and self.mode.needs_key(has_old_rows=True):
            raise SinkRefusedError(
                f"a table without a key cannot have the mode {self.mode}: its rows cannot be identified",
                hint="give the table a primary key, or choose the mode append or mirror",
            )

    @property
    def schema(self) -> pa.Schema:
        """The schema of the target: `columns`, then the columns that the mode adds, with `_exact` last. Every
        field is nullable.
        """
        return pa.schema([*self.columns, *self.mode.added_columns])

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns that identify one row of the target; empty if there are none."""
        return self.mode.identity(self.key)


def known_columns(layout: Layout, asked: Sequence[str]) -> list[str]:
    """The columns that are loaded first for the rows of a lookup: the columns that identify a row, the
    columns that were looked up (`asked`), and the columns that the mode adds. Without a key, these are all
    columns.
    """
    known = {*layout.identity, *asked, *layout.mode.added_names} if layout.key else set(layout.schema.names)
    return [name for name in layout.schema.names if name in known]
