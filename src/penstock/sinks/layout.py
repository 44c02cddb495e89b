"""The columns of a target table: the source's, and those that the table mode adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import SinkRefusedError
from penstock.sinks.modes import Mode


def known_columns(layout: Layout, asked: Sequence[str]) -> list[str]:
    """The columns that identify rows of the target, those of a lookup (`asked`), and added ones; without a
    key all columns.
    """
    known = {*layout.identity, *asked, *layout.mode.added_names} if layout.key else set(layout.schema.names)
    return [name for name in layout.schema.names if name in known]


@dataclass(frozen=True, slots=True)
class Layout:
    """Sent to the executors."""

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
        """The schema of the target:

        `columns`, then the columns of the mode and `_exact`. Every field is nullable.
        """
        return pa.schema([*self.columns, *self.mode.added_columns])

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns that identify one row of the target; empty if there are none."""
        return self.mode.identity(self.key)
