"""Keep a copy of a reference table in a directory, for executors to join with.

A thread of the driver reads the changes from the source and writes them to files next to the file with the
table's rows. It confirms durable changes to the source. The keeper compacts changes into the rows, up to the
oldest version that a query may still need. If the driver is killed, the directory has a complete state, from
which the next run continues.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from penstock.change import CHANGE_TYPE, COMMIT_VERSION, EXACT, ChangeType
from penstock.contracts.connector import SourceCheckpoint
from penstock.contracts.reference import PositionedReferenceTable, ReferenceTableSource, reference_schema
from penstock.errors import (
    ConfigError,
    PenstockError,
    Recovery,
    ReferenceBehindError,
    ReferenceBusyError,
    ReferenceStoreError,
    ReferenceTableError,
)
from penstock.location import absolute_path
from penstock.reference.history import row_schema
from penstock.reference.store import (
    LOCK,
    ChangesFile,
    Failure,
    RowFile,
    StoreState,
    base_columns,
    folded,
    joined,
    load_history,
    load_state,
    remove_others,
    store_state,
)
from penstock.retry import Backoff
from penstock.storage.locks import FileLock

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
_CONFIRM_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_MOST_INTERRUPTIONS = 5
_END_SECONDS = 30.0
_OLD_SECONDS = 60.0
_MOST_FILES = 64
_FEWEST_FOLDED_ROWS = 10_000


class KeptReference:
    """A reference table that is kept current between `start` and `stop`, or in a `with` block.

    Every executor must be able to read the directory. With `as_of_commit`, changes of a stream are joined
    with the table as of their own commit. Stream and table must then use the same capture, that is, the same
    slot, publication and spool.
    """

    def __init__(
        self, source: ReferenceTableSource, directory: str | Path, *, as_of_commit: bool = False
    ) -> None:
        if as_of_commit and not isinstance(source, PositionedReferenceTable):
            raise ConfigError(
                f"a {type(source).__name__} has no positions, so a stream cannot be joined with it as of a "
                "commit",
                hint="leave out as_of_commit, or use a table of the same capture as the stream",
            )
        self.directory = absolute_path(directory, "directory")
        self.as_of_commit = as_of_commit
        self._source = source
        self._lock = FileLock(self.directory / LOCK, self._refusal)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-reference", daemon=True)
        self._failure: BaseException | None = None
        self._state: StoreState | None = None
        self._columns: pa.Schema | None = None
        self._staged: RowFile | None = None
        self._highest = 0
        self._interruptions = 0
        """Number of interrupted snapshots."""
        self._confirm_due = 0.0
        self._unfolded_rows = 0
        """Number of changes since the last compaction."""
        self._retired: dict[str, float] = {}
        """Files that the state no longer names, each with the time at which it stopped naming them."""

    # --- for queries ----------------------------------------------------------------------------------------

    @property
    def columns(self) -> pa.Schema:
        """The table's own columns."""
        if self._columns is None:
            raise ReferenceTableError(
                "the reference table is not started", hint="call start(), or use it in a with block"
            )
        return self._columns

    @property
    def key(self) -> tuple[str, ...]:
        return self._known.key

    @property
    def identity(self) -> str:
        """Identity of this copy of the table; unchanged by a restart."""
        return self._known.identity

    def check(self) -> None:
        """Raise the error that ended the thread, if there was one.

        Tasks that wait for a later state raise it too.
        """
        if self._failure is not None:
            raise self._failure

    # --- lifecycle ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Continue from the stored state, or copy the table. Returns when a complete state is stored, so that
        queries can join with it.
        """
        self._lock.acquire()
        try:
            found = load_state(self.directory)
            self._state = self._copied() if found is None else self._restored(found)
            self._columns = base_columns(self.directory, self._state)
            self._unfolded_rows = self._state.changes_rows
            remove_others(self.directory, self._state.names)
        except BaseException:
            self._source.close()
            self._lock.release()
            raise
        self._thread.start()

    def stop(self) -> None:
        """Release the source and the directory; the stored table stays. May be called more than once."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_END_SECONDS)
        self._source.close()
        self._lock.release()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _known(self) -> StoreState:
        if self._state is None:
            raise ReferenceTableError(
                "the reference table is not started", hint="call start(), or use it in a with block"
            )
        return self._state

    def _refusal(self, holder: str) -> PenstockError:
        return ReferenceBusyError(
            f"the reference table in {self.directory} is already kept by process {holder}",
            hint="stop that process, or use another directory",
        )

    # --- the first state ------------------------------------------------------------------------------------

    def _copied(self) -> StoreState:
        source = self._source
        columns, floor = source.schema(), 0
        base = RowFile(self.directory, "base", row_schema(columns))
        try:
            while (batch := self._copied_batch()) is not None:
                floor = max(floor, pc.max(batch.column(COMMIT_VERSION)).as_py() or 0)
                if batch.column(CHANGE_TYPE)[0].as_py() == ChangeType.TRUNCATE:  # the snapshot restarts
                    base.discard()
                    base = RowFile(self.directory, "base", row_schema(columns))
                else:
                    base.write(batch.select([*columns.names, EXACT]))
        except BaseException:
            base.discard()
            raise
        checkpoint = source.checkpoint()
        floor = max(floor, self._reached(floor))
        state = StoreState(
            secrets.token_hex(8), source.key(), base.finish(), base.rows, floor, floor, checkpoint
        )
        load_history(self.directory, state)  # raises if two rows have the same key
        store_state(self.directory, state)
        source.confirm(checkpoint)
        return state

    def _copied_batch(self) -> pa.RecordBatch | None:
        """The next rows of the snapshot. A lost snapshot is restarted, a limited number of times."""
        backoff = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while True:
            try:
                return self._source.poll_snapshot()
            except PenstockError as error:
                self._interruptions += 1
                if error.recovery is not Recovery.RETRY or self._interruptions > _MOST_INTERRUPTIONS:
                    raise
                _log.warning(
                    "copy of a reference table interrupted",
                    extra={"code": error.code, "reason": error.message},
                )
                self._stopping.wait(backoff.fail())

    def _restored(self, state: StoreState) -> StoreState:
        self._source.restore(state.checkpoint)
        found, kept = self._source.schema(), base_columns(self.directory, state)
        if (found.names, found.types, self._source.key()) != (kept.names, kept.types, state.key):
            raise ReferenceStoreError(
                f"the table stored in {self.directory} has other columns or another key than the reference "
                "table",
                hint="remove the directory, so that the table is copied again, and restart the queries "
                "that join with it",
            )
        if state.failure is not None:
            state = replace(state, failure=None)
            store_state(self.directory, state)
        self._source.confirm(state.checkpoint)  # the last run may have stopped before this call
        return state

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._keep()
        except BaseException as error:  # noqa: BLE001 - edge of the thread: `check` and the tasks raise it
            self._fail(error)
        finally:
            self._discard()

    def _keep(self) -> None:
        backoff = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while not self._stopping.is_set():
            try:
                is_idle = not self._advance()
                backoff.reset()
            except PenstockError as error:
                if error.recovery is not Recovery.RETRY:
                    raise
                self._discard()
                pause = backoff.fail()
                _log.warning(
                    "reference table interrupted",
                    extra={"code": error.code, "reason": error.message, "pause_seconds": pause},
                )
                self._stopping.wait(pause)
                continue
            if is_idle:
                self._stopping.wait(_POLL_SECONDS)
        self._source.confirm(self._known.checkpoint)
        # Queries that continue must fail instead of joining with old rows.
        self._mark(
            ReferenceBehindError(
                f"the reference table in {self.directory} is no longer kept current",
                hint="keep it while queries run",
            )
        )

    def _advance(self) -> bool:
        """Read one batch, if there is one, and publish complete transactions. Returns whether there was a
        batch.
        """
        batch = self._source.poll_changes()
        if batch is not None:
            self._stage(batch)
        checkpoint = self._source.checkpoint()
        if checkpoint != self._known.checkpoint:
            self._publish(checkpoint)
            self._fold_if_due()
        return batch is not None

    def _stage(self, batch: pa.RecordBatch) -> None:
        if self._staged is None:
            self._staged = RowFile(self.directory, "changes", reference_schema(self.columns))
            self._highest = 0
        self._staged.write(batch)
        self._highest = max(self._highest, pc.max(batch.column(COMMIT_VERSION)).as_py())

    def _publish(self, checkpoint: SourceCheckpoint) -> None:
        state, staged = self._known, self._staged
        added: list[ChangesFile] = []
        reached = self._reached(state.reached)
        if staged is not None:
            reached = max(reached, self._highest)
            added.append(ChangesFile(staged.finish(), state.reached, reached, staged.rows))
            self._unfolded_rows += staged.rows
            self._staged = None
        self._count(state.with_changes(*added, reached=reached, checkpoint=checkpoint))
        self._confirm_if_due()

    def _count(self, state: StoreState) -> None:
        """Publish a state durably."""
        store_state(self.directory, state)
        self._state = state

    def _confirm_if_due(self) -> None:
        """Confirm the stored checkpoint to the source, at most once a second, because the source may write a
        file for each confirmation.
        """
        if time.monotonic() >= self._confirm_due:
            self._source.confirm(self._known.checkpoint)
            self._confirm_due = time.monotonic() + _CONFIRM_SECONDS

    def _reached(self, otherwise: int) -> int:
        source = self._source
        return (
            max(otherwise, source.reached().value)
            if isinstance(source, PositionedReferenceTable)
            else otherwise
        )

    def _discard(self) -> None:
        """Drop the rows of an incomplete transaction."""
        if self._staged is not None:
            self._staged.discard()
            self._staged = None

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        # The text of an error of another library may quote a value.
        named = (
            error
            if isinstance(error, PenstockError)
            else ReferenceTableError(f"the keeper ended with {type(error).__name__}")
        )
        _log.error("reference table failed", extra={"code": named.code, "reason": named.message})
        self._mark(named)

    def _mark(self, error: PenstockError) -> None:
        """Store the error in the directory, for readers. The state in memory is unchanged."""
        with suppress(OSError):
            store_state(self.directory, replace(self._known, failure=Failure.of(error)))

    # --- folding --------------------------------------------------------------------------------------------

    def _fold_if_due(self) -> None:
        """Compact the changes into the rows if there are many changes, since this rewrites the whole table.
        Otherwise, if there are many change files, only join the newest ones, which is cheap.
        """
        state = self._known
        is_due = self._unfolded_rows > max(state.base_rows, _FEWEST_FOLDED_ROWS)
        if not is_due and len(state.changes) <= _MOST_FILES:
            return
        floor = self._floor()
        old_rows = sum(each.rows for each in state.changes if each.after < floor)
        if floor > state.floor and (is_due or old_rows * 4 > state.base_rows):
            self._replace(folded(self.directory, state, floor, self.columns))
            self._unfolded_rows = 0
        elif len(state.changes) > _MOST_FILES:
            self._replace(joined(self.directory, state, self.columns))

    def _floor(self) -> int:
        """The oldest version that a query may still need."""
        state, source = self._known, self._source
        if not self.as_of_commit or not isinstance(source, PositionedReferenceTable):
            return state.reached
        return max(state.floor, min(source.settled().value, state.reached))

    def _replace(self, state: StoreState) -> None:
        before = self._known.names
        self._count(state)
        self._retire(before - state.names)

    def _retire(self, names: Iterable[str]) -> None:
        """Delete files that the state has not named for a while. From now on, the state does not name the
        files `names`.
        """
        now = time.monotonic()
        self._retired |= dict.fromkeys(names, now)
        young = {name for name, since in self._retired.items() if now - since < _OLD_SECONDS}
        remove_others(self.directory, self._known.names | young)
        self._retired = {name: since for name, since in self._retired.items() if name in young}


def keep(source: ReferenceTableSource, directory: str | Path, *, as_of_commit: bool = False) -> KeptReference:
    """Keep a reference table in a directory that every executor can read. Call `start`, or use it in a `with`
    block.
    """
    return KeptReference(source, directory, as_of_commit=as_of_commit)
