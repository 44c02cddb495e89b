"""Keys on their way into a file that is not written if it would be the same as the one before.

At most looks no key has come or gone. So what comes is first compared with what is there, row by row in the order that both have; the file
is begun when something differs, and takes over from the other what was the same.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.spool import storage

_BATCH_ROWS = 65_536


class KeyFile:
    """A file to be, `before` the one that it is compared with. `finish` it, and `close` it in any case."""

    def __init__(self, path: Path, schema: pa.Schema, before: Path | None = None) -> None:
        self._path = path
        self._schema = schema
        self._before = before
        self._known = None if before is None else _Rows(before)
        self._same_rows = 0
        self._writer: pq.ParquetWriter | None = None

    def write(self, columns: list[pa.Array]) -> None:
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        if self._known is not None:
            if self._known.take(batch.num_rows).equals(pa.Table.from_batches([batch])):
                self._same_rows += batch.num_rows
                return
            self._take_over()
        self._open().write_batch(batch)

    def finish(self) -> None:
        """Durable after this. There is no file if all keys were the same."""
        if self._known is not None:
            if not self._known.take(1).num_rows:
                return
            self._take_over()
        self._open()
        self.close()
        storage.sync_file(self._path)

    def close(self) -> None:
        if self._known is not None:
            self._known.close()
            self._known = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> pq.ParquetWriter:
        if self._writer is None:
            storage.make_directory(self._path.parent)
            storage.ensure_file(self._path)
            self._writer = pq.ParquetWriter(self._path, self._schema)
        return self._writer

    def _take_over(self) -> None:
        """Begin the file with what was the same so far."""
        assert self._before is not None
        assert self._known is not None
        self._known.close()
        self._known = None
        writer, rows = self._open(), _Rows(self._before)
        try:
            while self._same_rows:
                taken = rows.take(min(self._same_rows, _BATCH_ROWS))
                writer.write_table(taken)
                self._same_rows -= taken.num_rows
        finally:
            rows.close()


class _Rows:
    """The rows of a file, so many at a time as one asks for."""

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetFile(path)
        self._batches = self._file.iter_batches(_BATCH_ROWS)
        self._held = self._file.schema_arrow.empty_table()

    def take(self, count: int) -> pa.Table:
        """Less only at the end."""
        while self._held.num_rows < count and (batch := next(self._batches, None)) is not None:
            self._held = pa.concat_tables([self._held, pa.Table.from_batches([batch])])
        taken, self._held = self._held.slice(0, count), self._held.slice(count)
        return taken

    def close(self) -> None:
        self._file.close()
