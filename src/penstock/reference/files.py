"""The files of a kept reference table: written whole and made durable, and read back as a history."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.change import COMMIT_VERSION, EXACT
from penstock.errors import ReferenceStoreError
from penstock.reference.history import ReferenceHistory
from penstock.reference.store import ChangesFile, StoreState
from penstock.spool import storage


class RowFile:
    """A Parquet file that is being written; it is there once `finish` has returned, and gone after `discard`."""

    def __init__(self, directory: Path, kind: str, schema: pa.Schema) -> None:
        self.name = f"{kind}-{secrets.token_hex(8)}.parquet"
        self.rows = 0
        self._path = directory / self.name
        self._schema = schema
        storage.make_directory(directory)
        storage.ensure_file(self._path)
        self._writer = pq.ParquetWriter(self._path, schema, compression="none")

    def write(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Of the columns of the file, in their order."""
        table = pa.Table.from_arrays(rows.columns, schema=self._schema)
        self._writer.write_table(table)
        self.rows += table.num_rows

    def finish(self) -> str:
        self._writer.close()
        storage.sync_file(self._path)
        storage.sync_directory(self._path.parent)
        return self.name

    def discard(self) -> None:
        self._writer.close()
        storage.remove_file(self._path)


def load_history(directory: Path, state: StoreState, upto: int | None = None) -> ReferenceHistory:
    """The base, and all changes that count, up to a version. `FileNotFoundError` if the state is not the newest any more."""
    with _opened(directory / state.base) as base:
        schema = base.schema_arrow
        history = ReferenceHistory(pa.schema([field for field in schema if field.name != EXACT]), state.key, state.floor)
        for batch in base.iter_batches():
            history.load(batch)
    apply_changes(history, directory, state, after=state.floor, upto=upto)
    return history


def apply_changes(history: ReferenceHistory, directory: Path, state: StoreState, *, after: int, upto: int | None = None) -> None:
    """Bring a history that has everything up to `after` to the end of the state, or to `upto`."""
    for batch in read_changes(directory, state.changes, after=after, upto=upto):
        history.apply(batch)


def read_changes(directory: Path, files: Iterable[ChangesFile], *, after: int, upto: int | None = None) -> Iterator[pa.RecordBatch]:
    """Changes of versions after `after` and up to `upto`, in order."""
    for each in files:
        if each.upto <= after or (upto is not None and each.after >= upto):
            continue
        with _opened(directory / each.name) as file:
            for batch in file.iter_batches():
                versions = batch.column(COMMIT_VERSION)
                wanted = pc.greater(versions, after)
                if upto is not None:
                    wanted = pc.and_(wanted, pc.less_equal(versions, upto))
                kept = batch.filter(wanted)
                if kept.num_rows:
                    yield kept


def base_columns(directory: Path, state: StoreState) -> pa.Schema:
    """The table's own columns."""
    with _opened(directory / state.base) as base:
        return pa.schema([field for field in base.schema_arrow if field.name != EXACT])


def _opened(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        # Arrow may quote a value in its message.
        raise ReferenceStoreError(
            f"{path} cannot be read: {type(error).__name__}", hint="remove the directory, so that the table is copied anew"
        ) from error
