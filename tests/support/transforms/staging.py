"""A sink that records the changes it is given."""

from __future__ import annotations

import pyarrow as pa
from typing_extensions import override

from penstock.position import Position
from penstock.sinks.base import TableChanges, Target
from penstock.sinks.modes import Layout, Mode
from penstock.sinks.slice_reader import read_slices
from tests.support.snapshot.local import FileSink


class RecordingSink(FileSink):
    """Records the changes of the last epoch instead of writing them."""

    taken: pa.Table
    changes: TableChanges
    error: Exception | None = None

    @override
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        if self.error is not None:
            raise self.error
        self.changes = changes
        schema = changes.slices[0].file.schema
        columns = pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns])
        self.taken = read_slices(
            changes.slices, Layout(columns, schema.key, Mode.MIRROR), views=changes.views
        )
