"""One Parquet file of changes while it is being written.

Uncompressed, since the JVM reads that fastest, and without dictionaries but for the change type, which has five values: the same CPU, ten
bytes a row less. The Arrow schema is always `change_schema(table)`, so any number of files of one schema version can be read together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.change import CHANGE_TYPE, ChangeBatch, ChangeCounts, change_schema
from penstock.errors import SpoolError
from penstock.schema import TableSchema
from penstock.spool import storage

ROW_GROUP_ROWS = 1 << 20


class ChangeFile:
    """Rows go in as row groups; `finish` says how large the file is. Whoever makes it part of a segment sees to it that it is durable."""

    def __init__(self, path: Path, table: TableSchema) -> None:
        self.path = path
        self.table = table
        self.rows = 0
        self.counts = ChangeCounts()
        self._schema = change_schema(table)
        self._sink = storage.create_file(path)
        self._writer = pq.ParquetWriter(
            self._sink, self._schema, compression="none", use_dictionary=[CHANGE_TYPE], write_statistics=True, version="2.6"
        )

    def write(self, batches: Sequence[ChangeBatch]) -> None:
        """Append the batches as one row group, or as several when they are very long."""
        rows = pa.Table.from_batches([batch.rows for batch in batches], schema=self._schema)
        self._writer.write_table(rows, row_group_size=ROW_GROUP_ROWS)
        self.rows += rows.num_rows
        for batch in batches:
            self.counts += batch.counts

    def finish(self) -> int:
        self._writer.close()
        size_bytes: int = self._sink.tell()
        self._sink.close()
        return size_bytes

    def abandon(self) -> None:
        """Let go of the descriptor; the file is left as it is, for someone else to remove."""
        self._sink.close()
        self._writer.is_open = False


def check_batch(batch: ChangeBatch) -> None:
    """Refuse rows that are not what their table's schema says: they could not be read together with others."""
    if not batch.rows.schema.equals(change_schema(batch.table)):
        raise SpoolError(f"a batch of {batch.table.name} does not have the columns of its table")
