"""`ParquetReferenceTable`: a reference table of Parquet files that are replaced from time to time.

Files have no log, so a change of the files delivers the whole table again: a truncate and every row, all with
one version. The reader numbers the versions. A checkpoint is small: the version, and a fingerprint of the
files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from penstock import storage
from penstock.change import METADATA_NAMES, ChangeType
from penstock.contracts.connector import SourceCheckpoint
from penstock.contracts.reference import ReferenceTableSource, as_changes, as_truncate
from penstock.errors import (
    CheckpointError,
    ConfigError,
    ConnectorStateError,
    ReferenceUnreadableError,
    SchemaChangedError,
)
from penstock.location import absolute_path

_BATCH_ROWS = 10_000
_ANEW = "start without a checkpoint, which reads the files again"


class ParquetReferenceTable(ReferenceTableSource):
    """One Parquet file, or all files of a directory whose names end with `.parquet` and begin with neither
    `_` nor `.`.

    To replace a file, rename another file to its name, or switch a symbolic link to another directory: then
    only complete states are read. Files that are written in place may be read in an incomplete state; they
    are read again after their next change.
    """

    def __init__(self, path: str | Path, key: Sequence[str]) -> None:
        self._path = absolute_path(path, "path")
        self._key = tuple(key)
        self._schema: pa.Schema | None = None
        self._rows: Generator[pa.RecordBatch] | None = None
        self._next: pa.RecordBatch | None = None
        self._version = 0
        """The last version that was delivered completely."""
        self._fingerprint: str | None = None
        self._reading = ""
        """The fingerprint of the version that is being delivered."""
        self._epoch = 0
        self._has_rows = False
        self._is_used = False
        self._is_closed = False

    @override
    def schema(self) -> pa.Schema:
        if self._schema is None:
            with ExitStack() as stack:
                self._schema = parquet_columns(self._open(stack)[0].schema_arrow, self._key)
        return self._schema

    @override
    def key(self) -> tuple[str, ...]:
        return tuple(name for name in self.schema().names if name in self._key)

    @override
    def poll_snapshot(self) -> pa.RecordBatch | None:
        self._check_open()
        self._is_used = True
        if self.is_snapshot_complete():
            return None
        if self._rows is None:
            # If an interrupted attempt has delivered rows, begin with a truncate.
            self._begin(ChangeType.SNAPSHOT, emptied=self._has_rows)
        return self._take()

    @override
    def is_snapshot_complete(self) -> bool:
        return self._fingerprint is not None

    @override
    def poll_changes(self) -> pa.RecordBatch | None:
        """Compare names, sizes and times of the files, and open them only if any of these changed."""
        self._check_open()
        if not self.is_snapshot_complete():
            raise ConnectorStateError(
                f"the snapshot of {self._path} is not complete",
                hint="call poll_snapshot until it returns None",
            )
        if self._rows is None:
            if self._look() == self._fingerprint:
                return None
            self._begin(ChangeType.INSERT, emptied=True)
        return self._take()

    @override
    def checkpoint(self) -> SourceCheckpoint:
        offsets = (
            {}
            if self._fingerprint is None
            else {"version": str(self._version), "fingerprint": self._fingerprint}
        )
        return SourceCheckpoint(offsets, self._epoch, {"key": ",".join(self._key)})

    @override
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        self._check_open()
        if self._is_used:
            raise ConnectorStateError(
                f"reading of {self._path} has started, so no checkpoint can be restored",
                hint="call restore before the first poll",
            )
        if checkpoint.metadata.get("key", ",".join(self._key)) != ",".join(self._key):
            raise CheckpointError("the checkpoint is of a table with another key", hint=_ANEW)
        self._epoch = checkpoint.epoch
        if checkpoint.offsets:
            try:
                self._version, self._fingerprint = (
                    int(checkpoint.offsets["version"]),
                    checkpoint.offsets["fingerprint"],
                )
            except (KeyError, ValueError) as error:
                raise CheckpointError(
                    "the checkpoint is not one of a Parquet reference table", hint=_ANEW
                ) from error
        self._is_used = True

    @override
    def close(self) -> None:
        self._is_closed = True
        self._drop()

    # --- reading --------------------------------------------------------------------------------------------

    def _begin(self, kind: ChangeType, *, emptied: bool) -> None:
        """Open all files before returning the first row, to detect most errors early."""
        self.schema()
        self._reading = self._look()
        stack = ExitStack()
        try:
            files = self._open(stack)
            for file in files:
                self._check_same(file.schema_arrow)
        except BaseException:
            stack.close()
            raise
        self._rows = self._read(files, stack, kind, emptied=emptied)
        self._next = self._following()

    def _take(self) -> pa.RecordBatch | None:
        """Return the next batch. Reads one batch ahead, so that `checkpoint` advances with the last batch."""
        batch = self._next
        self._has_rows = self._has_rows or batch is not None
        self._next = self._following() if batch is not None else None
        if self._next is None:
            self._rows = None
            self._version, self._fingerprint = self._version + 1, self._reading
            self._epoch += 1
        return batch

    def _following(self) -> pa.RecordBatch | None:
        assert self._rows is not None
        try:
            return next(self._rows, None)
        except (OSError, pa.ArrowException) as error:
            self._drop()
            raise self._unreadable(error) from error

    def _read(
        self, files: Sequence[pq.ParquetFile], stack: ExitStack, kind: ChangeType, *, emptied: bool
    ) -> Generator[pa.RecordBatch]:
        version, schema, ordinal = self._version + 1, self.schema(), 0
        with stack:
            if emptied:
                yield as_truncate(schema, version)
                ordinal = 1
            for file in files:
                for batch in file.iter_batches(_BATCH_ROWS):
                    if batch.num_rows:
                        rows = pa.RecordBatch.from_arrays(batch.select(schema.names).columns, schema=schema)
                        yield as_changes(rows, kind, version, ordinal)
                        ordinal += batch.num_rows

    def _drop(self) -> None:
        if self._rows is not None:
            self._rows.close()
        self._rows = self._next = None

    # --- the files ------------------------------------------------------------------------------------------

    def _files(self) -> list[Path]:
        if not storage.is_directory(self._path):
            return [self._path]
        names = storage.list_files(self._path)
        return [
            self._path / name
            for name in names
            if name.endswith(".parquet") and not name.startswith(("_", "."))
        ]

    def _look(self) -> str:
        marks = [(path.name, *(storage.file_version(path) or ())) for path in self._files()]
        return hashlib.sha256(repr((str(self._path.resolve()), marks)).encode()).hexdigest()

    def _open(self, stack: ExitStack) -> list[pq.ParquetFile]:
        files = self._files()
        if not files:  # an empty table has a file without rows; an empty directory is still being filled
            raise ReferenceUnreadableError(
                f"no Parquet file in {self._path}", hint="add one; for an empty table, a file without rows"
            )
        try:
            return [stack.enter_context(pq.ParquetFile(path)) for path in files]
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> ReferenceUnreadableError:
        # Arrow may quote a value in its message.
        return ReferenceUnreadableError(
            f"the Parquet files at {self._path} cannot be read: {type(error).__name__}",
            hint="if they are being written, wait; otherwise replace them with complete files",
        )

    def _check_same(self, found: pa.Schema) -> None:
        schema = self.schema()
        if {field.name: field.type for field in found} != {field.name: field.type for field in schema}:
            raise SchemaChangedError(
                f"the Parquet files at {self._path} have different columns than before", hint=_ANEW
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConnectorStateError(
                f"the reference table {self._path} is closed",
                hint="create another one and restore its checkpoint",
            )


def parquet_columns(schema: pa.Schema, key: Sequence[str]) -> pa.Schema:
    """The columns of the files. Raises if they cannot be a reference table with this key."""
    if not key:
        raise ConfigError("a reference table needs a key", hint="name the columns that identify its rows")
    missing = [name for name in key if name not in schema.names]
    if missing:
        raise ConfigError(
            f"the Parquet files have no column {missing[0]!r}", hint=f"they have: {', '.join(schema.names)}"
        )
    reserved = sorted(METADATA_NAMES.intersection(schema.names))
    if reserved:
        raise ConfigError(
            f"the Parquet files have a column named {reserved[0]!r}, which is reserved for metadata of "
            "changes",
            hint="rename the column",
        )
    return pa.schema([pa.field(field.name, field.type) for field in schema])
