"""Files of a stored reference table: state document, row and change files, compaction.

The driver and the executors must be able to reach the directory. Files are written completely and made
durable before the state refers to them.

```
reference.json            the state: identity, positions, and the files below that belong to it
base-….parquet            the whole table, as of the floor
changes-….parquet         the changes after the floor, in order
lock                      held by the keeper
```

Only files that `reference.json` names belong to the table. It is replaced atomically, so readers see one
state or the next, never half a transaction. Unreferenced files stay for a while, for readers that still use
an older state.

`folded` and `joined` write new files next to the referenced ones, and return a state that names them. That
state takes effect when it is stored.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock import storage
from penstock.change import COMMIT_VERSION, EXACT
from penstock.contracts.connector import SourceCheckpoint
from penstock.contracts.reference import reference_schema
from penstock.errors import CheckpointError, PenstockError, ReferenceStoreError
from penstock.reference.history import ReferenceHistory

FORMAT = 1
STATE = "reference.json"
LOCK = "lock"

_ANEW = "remove the directory, so that the table is copied again, or use another one"


@dataclass(frozen=True, slots=True)
class ChangesFile:
    """A file of whole transactions, with versions after `after` and up to `upto`."""

    name: str
    after: int
    upto: int
    rows: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that ended the keeper, for readers in other processes."""

    code: str
    message: str
    hint: str | None = None

    @classmethod
    def of(cls, error: PenstockError) -> Self:
        return cls(error.code, error.message, error.hint)

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclass(frozen=True, slots=True)
class StoreState:
    """Content of `reference.json`."""

    identity: str
    """Identity of this copy of the table. A new copy in the same directory has another one."""
    key: tuple[str, ...]
    base: str
    base_rows: int
    floor: int
    reached: int
    """All changes up to this version are stored."""
    checkpoint: SourceCheckpoint
    changes: tuple[ChangesFile, ...] = ()
    failure: Failure | None = field(default=None)

    @property
    def names(self) -> frozenset[str]:
        """Names of the referenced files."""
        return frozenset({self.base, *(each.name for each in self.changes)})

    @property
    def changes_rows(self) -> int:
        return sum(each.rows for each in self.changes)

    def with_changes(self, *added: ChangesFile, reached: int, checkpoint: SourceCheckpoint) -> StoreState:
        return replace(
            self, changes=(*self.changes, *added), reached=reached, checkpoint=checkpoint, failure=None
        )

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self), "checkpoint": self.checkpoint.to_json()})

    @classmethod
    def parse(cls, text: str, where: Path) -> StoreState:
        try:
            document = json.loads(text)
            found = document.pop("format")
            if not isinstance(found, int) or found > FORMAT:
                raise ReferenceStoreError(
                    f"{where} has format {found}, and this version of penstock reads up to {FORMAT}",
                    hint="run the version that wrote it",
                )
            return _parse(document)
        except (KeyError, TypeError, ValueError, CheckpointError) as error:
            raise ReferenceStoreError(f"{where} is invalid", hint=_ANEW) from error


def _parse(document: dict[str, Any]) -> StoreState:
    failure = document.pop("failure")
    return StoreState(
        key=tuple(document.pop("key")),
        checkpoint=SourceCheckpoint.from_json(document.pop("checkpoint")),
        changes=tuple(ChangesFile(**each) for each in document.pop("changes")),
        failure=Failure(**failure) if failure is not None else None,
        **document,
    )


def load_state(directory: Path) -> StoreState | None:
    """The stored state; None if the directory has no table yet."""
    data = storage.read(directory / STATE)
    return StoreState.parse(data.decode(), directory / STATE) if data is not None else None


def store_state(directory: Path, state: StoreState) -> None:
    """Publish a state durably. The files that it names must be durable already."""
    storage.put(directory / STATE, state.to_json().encode())


def remove_others(directory: Path, kept: Iterable[str]) -> None:
    """Remove all files of the store except these."""
    names = {*kept, STATE, LOCK}
    for name in storage.list_files(directory):
        if name not in names and name.startswith(("base-", "changes-", STATE)):
            storage.delete(directory / name)


class RowFile:
    """A Parquet file that is being written. `finish` makes it durable, `discard` removes it."""

    def __init__(self, directory: Path, kind: str, schema: pa.Schema) -> None:
        self.name = f"{kind}-{secrets.token_hex(8)}.parquet"
        self.rows = 0
        self._path = directory / self.name
        self._schema = schema
        storage.ensure_directory(directory)
        storage.ensure_file(self._path)
        self._writer = pq.ParquetWriter(self._path, schema, compression="none")

    def write(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Append rows, whose columns must be in the order of the file's columns."""
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
        storage.delete(self._path)


def load_history(directory: Path, state: StoreState, upto: int | None = None) -> ReferenceHistory:
    """The history of a stored table: its base, and the changes of `state` up to the version `upto`. Raises
    `FileNotFoundError` if `state` is no longer the newest and its files have been removed.
    """
    with _opened(directory / state.base) as base:
        schema = base.schema_arrow
        history = ReferenceHistory(
            pa.schema([field for field in schema if field.name != EXACT]), state.key, state.floor
        )
        for batch in base.iter_batches():
            history.load(batch)
    apply_changes(history, directory, state, after=state.floor, upto=upto)
    return history


def apply_changes(
    history: ReferenceHistory, directory: Path, state: StoreState, *, after: int, upto: int | None = None
) -> None:
    """Advance a history that has everything up to `after` to the end of the state, or to `upto`."""
    for batch in read_changes(directory, state.changes, after=after, upto=upto):
        history.apply(batch)


def read_changes(
    directory: Path, files: Iterable[ChangesFile], *, after: int, upto: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Changes with versions after `after`, up to `upto`, in order."""
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
            f"{path} cannot be read: {type(error).__name__}",
            hint="remove the directory, so that the table is copied again",
        ) from error


def folded(directory: Path, state: StoreState, floor: int, columns: pa.Schema) -> StoreState:
    """Write a new base of the table as of `floor`, and one file with all later changes."""
    rows = load_history(directory, state, upto=floor).rows_at(floor)
    base = RowFile(directory, "base", rows.schema)
    base.write(rows)
    left = _one_of(directory, state.changes, floor, state.reached, columns)
    return replace(state, base=base.finish(), base_rows=base.rows, floor=floor, changes=left)


def joined(directory: Path, state: StoreState, columns: pa.Schema) -> StoreState:
    """Join the newest change files, so that each file has more than twice as many rows as the next one. So
    there are few files, and each change is rewritten only a few times.
    """
    first, rows = len(state.changes) - 1, state.changes[-1].rows
    while first > 0 and state.changes[first - 1].rows <= 2 * rows:
        first -= 1
        rows += state.changes[first].rows
    kept, newest = state.changes[:first], state.changes[first:]
    return replace(
        state, changes=(*kept, *_one_of(directory, newest, newest[0].after, newest[-1].upto, columns))
    )


def _one_of(
    directory: Path, files: Sequence[ChangesFile], after: int, upto: int, columns: pa.Schema
) -> tuple[ChangesFile, ...]:
    """Write one file with all changes of `files` after the version `after`. The result is empty if there are
    none.
    """
    file = RowFile(directory, "changes", reference_schema(columns))
    for batch in read_changes(directory, files, after=after):
        file.write(batch)
    if file.rows:
        return (ChangesFile(file.finish(), after, upto, file.rows),)
    file.discard()
    return ()
