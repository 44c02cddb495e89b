"""Copy one table into the target: plan or resume, read chunk by chunk, repair, commit.

The plan and the record of every chunk are durable (`snapshots/state.py`), so the next round, or the next run,
continues with the missing chunks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol

from penstock import storage
from penstock.errors import NoTablesError, TableRewrittenError
from penstock.pipeline.dead_letters.snapshot_rejections import (
    RejectedRows,
    chunk_rejected_file,
    open_rejected_file,
)
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.snapshots.executors import (
    AskingSink,
    KeyTask,
    SnapshotExecutors,
    changed_between,
    is_repairable,
    key_reader,
    plan_rereading,
)
from penstock.pipeline.snapshots.schedule import Step
from penstock.pipeline.snapshots.state import (
    ChunkRecord,
    SavedSnapshot,
    SnapshotPlan,
    SnapshotProgress,
    SnapshotStore,
    measure,
    new_plan_id,
)
from penstock.pipeline.snapshots.task import (
    ChunkTask,
    RecordedTask,
    record_rows,
    recording_writer,
    source_rows,
)
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.chunks import cut_chunks
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.snapshot_export import (
    CopyFingerprint,
    ExportedSnapshot,
    MeasuredTable,
    inspect_fingerprint,
    inspect_outline,
)
from penstock.postgres.types.column import TypePolicy
from penstock.retry import Backoff
from penstock.schema import TableName, TableSchema
from penstock.sinks.base import ChangedRows, Sink, SnapshotFile
from penstock.spool.reader import SpoolReader


def gather_refused(
    plan: SnapshotPlan,
    records: Path,
    chunks: Mapping[int, ChunkRecord],
    reread: Sequence[KeyTask],
    unmade: Sequence[str],
) -> list[RejectedRows]:
    """Return the files of rejected rows for each source table that has any: rejected rows of chunks, rejected
    re-read rows (`reread`), and re-read rows that the transform rejected (`unmade`).
    """
    found = []
    for part in plan.outline.parts:
        name = part.schema.name
        own = [
            (number, record.fence)
            for number, record in sorted(chunks.items())
            if plan.chunks[number].schema.name == name
        ]
        rejected_files = (
            rejected_file(records, number, fence)
            for number, fence in own
            for rejected_file in (chunk_rejected_file, open_rejected_file)
        )
        again = _existing(task.rejected_file for task in reread if task.outline.schema.name == name)
        refused = RejectedRows(
            part.schema, _existing(rejected_files), (*again, *unmade), plan.outline.constants(part)
        )
        if refused.chunks or refused.repaired:
            found.append(refused)
    return found


def _existing(paths: Iterable[Path]) -> tuple[str, ...]:
    return tuple(str(path) for path in paths if storage.exists(path))


_log = logging.getLogger("penstock.snapshot")

_SMALLEST_CHUNK_BYTES = 16 << 20
_LOCKED_BYTES = 64 << 20
"""A table with at most this heap size may be locked while it is copied. The copy then takes a second or two.
"""
_FIRST_RESTART_SECONDS = 1.0
_LONGEST_RESTART_SECONDS = 600.0
_CHUNKS_A_LANE = 4


@dataclass(frozen=True, slots=True)
class CopyPlaces:
    """Parameters that the copies of all tables share: source, target, callbacks."""

    executors: SnapshotExecutors
    address: SourceAddress
    sink: Sink
    store: SnapshotStore
    spool: Path
    observer: PipelineObserver
    chunk_bytes: int
    lanes: int
    """Number of threads that copy tables at the same time."""
    types: TypePolicy
    publication: str | None
    is_stopping: Callable[[], bool]
    dead_letters: SnapshotDeadLetters
    positions_are_polls: bool = False
    """Whether the capture method is polling, where one position stands for one poll. A poll contains the
    transactions that were committed after the previous poll.
    """


class SnapshotDeadLetters(Protocol):
    """Takes the rows that are rejected while a table is copied."""

    def diverts(self, table: TableName) -> bool:
        """Whether rejected rows become dead letters instead of failing the copy."""

    def store_copied(
        self,
        schema: TableSchema,
        refused: Sequence[RejectedRows],
        fence: Position,
        changed: ChangedRows | None,
    ) -> None:
        """Store the rejected rows, which are in the files `refused`. Called before the target commits the
        copy. `changed`: the rows that changed during the copy; None if no row changed.
        """

    def copied(self, table: TableName) -> None:
        """Turn the stored rows into dead letters. Called after the target has committed the copy."""


class TableCopy:
    """The copy of one table into the target. Threads of the round execute its steps, one step at a time. Only
    chunks are read in parallel.
    """

    def __init__(self, table: CatalogTable, places: CopyPlaces) -> None:
        self.table = table
        self.restarts = Backoff(_FIRST_RESTART_SECONDS, _LONGEST_RESTART_SECONDS)
        """Counts interruptions of the copy, and gives the pause after each. A copy is interrupted if the
        table was rewritten, truncated or altered, or could not be locked.
        """
        self.restarts_at = 0.0
        self.session: Connection | None = None
        """The session that holds the lock on the table; None if the table is not locked. The whole of a
        locked table is read in this session.
        """
        self._places = places
        self._plan: SnapshotPlan | None = None
        self._records: dict[int, ChunkRecord] = {}
        self._fence = Position.ZERO
        self._changed: ChangedRows | None = None
        self._reread: tuple[KeyTask, ...] = ()
        self._invalid_reason: str | None = None

    @property
    def name(self) -> TableName:
        return self.table.name

    @property
    def plan(self) -> SnapshotPlan:
        assert self._plan is not None, "a table is opened before anything else"
        return self._plan

    @property
    def progress(self) -> SnapshotProgress:
        return measure(SavedSnapshot(self.plan, dict(self._records)))

    def open(self, exported: ExportedSnapshot) -> list[tuple[int, int]]:
        """Resume the stored plan, or make a new one. Returns the number and the heap bytes of each missing
        chunk.
        """
        places = self._places
        with connect(places.address) if self.session is None else nullcontext(self.session) as connection:
            found = inspect_outline(connection, self.table, places.types, places.publication)
        if not found.outline.schema.columns:
            raise NoTablesError(
                f"table {self.name} no longer exists", hint="remove it from the tables, or create it again"
            )
        saved = places.store.load(self.name)
        if saved is not None and not saved.records and saved.plan.chunks:
            saved = None  # no chunk was read yet: a new plan has a later fence, so less needs repair
        reason = self._invalid_reason or (
            None if saved is None else self._restart_reason(saved, found, exported)
        )
        self._invalid_reason, self._changed, self._reread = None, None, ()
        if saved is None or reason is not None:
            if reason is not None:
                self._announce_restart(reason)
            self._begin(found, exported)
        else:
            self._resume(saved, found.outline)
        return [(number, self.plan.chunks[number].heap_bytes) for number in self._missing]

    def then(self, exported: ExportedSnapshot) -> Step:
        """Return the step that follows the last chunk. It is the commit if all chunks have the same fence;
        otherwise changed rows have to be read again.
        """
        fences = {record.fence for record in self._records.values()}
        self._fence = exported.fence if len(fences) != 1 else next(iter(fences))
        return Step.COMMIT if len(fences) <= 1 else Step.REREAD

    def read(self, exported: ExportedSnapshot, number: int) -> None:
        """Read one chunk on an executor, which also records the chunk as read. With a `session`, the driver
        does both.
        """
        places, plan = self._places, self.plan
        task = ChunkTask(number, plan.chunks[number], plan.place)
        recorded = RecordedTask(task, str(places.store.records_directory(plan)), exported.fence)
        record = self._run(exported, recorded)
        self._records[number] = record
        facts = {
            "table": str(self.name),
            "plan": plan.id,
            "chunk": number,
            "rows": record.file.rows,
            "fence": str(record.fence),
        }
        _log.info("chunk read", extra=facts)
        places.observer.snapshot_advanced(self.name, 1, record.file.rows, plan.chunks[number].heap_bytes)
        places.observer.snapshot_progressed(self.progress)

    def _run(self, exported: ExportedSnapshot, recorded: RecordedTask) -> ChunkRecord:
        places, schema = self._places, self.plan.outline.schema
        how = {"reject_inexact": places.types.rejects_inexact, "diverts": self._diverts}
        asker = places.sink.asker_for(schema) if isinstance(places.sink, AskingSink) else None
        if asker is not None:
            read = partial(source_rows, places.address, exported.name, recorded, **how)
            rejected_path = (
                open_rejected_file(Path(recorded.records), recorded.task.index, recorded.fence)
                if self._diverts
                else None
            )
            return asker.copy(places.executors, read, partial(record_rows, recorded), rejected_path)
        writer = recording_writer(
            places.address, exported.name, places.sink.writer_for(schema), session=self.session, **how
        )
        (record,) = places.executors.run(writer, [recorded], light=self.session is not None)
        return record

    def reread(self, exported: ExportedSnapshot) -> bool:
        """Read again, by key, the rows that changed between the first fence and the fence of `exported`.
        Returns True when the rows are read, and False if the run ends before that.
        """
        places, outline = self._places, self.plan.outline
        first = min(record.fence for record in self._records.values())
        slices = changed_between(
            places.spool,
            outline,
            first,
            exported.fence,
            places.is_stopping,
            positions_are_polls=places.positions_are_polls,
        )
        if slices is None:
            return False
        self._fence, self._changed, self._reread = exported.fence, None, ()
        if slices:
            directory = places.store.records_directory(self.plan) / f"repair-{exported.fence.value:016X}"
            tasks = plan_rereading(places.executors, outline, slices, directory)
            refuses = places.types.rejects_inexact
            reader = key_reader(places.address, exported.name, reject_inexact=refuses, diverts=self._diverts)
            files = places.executors.run(reader, tasks) if tasks else []
            rows = tuple(str(directory / "rows" / file.name) for file in files if file.rows)
            self._changed, self._reread = ChangedRows(str(directory / "keys"), rows), tuple(tasks)
            facts = {
                "table": str(self.name),
                "first": str(first),
                "fence": str(exported.fence),
                "rows": sum(file.rows for file in files),
            }
            _log.info("changed rows read again", extra=facts)
        return True

    def commit(self) -> None:
        """Commit the files and the fence to the target. Raises `TableRewrittenError` if the table was altered
        during the copy.
        """
        places, plan = self._places, self.plan
        with connect(places.address) as connection:
            fingerprint = inspect_fingerprint(connection, self.table, places.publication)
        if fingerprint != plan.outline.fingerprint:
            raise TableRewrittenError(
                f"table {self.name} was altered while it was being copied; its snapshot starts again"
            )
        files = [self._records[number].file for number in sorted(self._records)]
        target = places.sink.load_target(self.name)
        if (
            target is None or target.applied != self._fence
        ):  # if they are equal, an earlier attempt was committed and only its reply was lost
            self._hand_over(files)
        places.dead_letters.copied(self.name)
        places.store.forget(self.name)
        rows = sum(file.rows for file in files)
        _log.info(
            "snapshot finished",
            extra={"table": str(self.name), "plan": plan.id, "fence": str(self._fence), "rows": rows},
        )
        places.observer.snapshot_finished(self.name, rows)

    def _hand_over(self, files: Sequence[SnapshotFile]) -> None:
        places, schema, changed = self._places, self.plan.outline.schema, self._changed
        if self._diverts:
            unmade: Sequence[str] = ()
            if changed is not None and isinstance(places.sink, AskingSink):
                changed, unmade = places.sink.make_changed(schema, changed)
            records = places.store.records_directory(self.plan)
            refused = gather_refused(self.plan, records, self._records, self._reread, unmade)
            places.dead_letters.store_copied(schema, refused, self._fence, self._changed)
        if changed is None:
            places.sink.finish_snapshot(schema, files, self._fence)
        else:
            places.sink.repair_snapshot(schema, files, changed, self._fence)

    @property
    def _diverts(self) -> bool:
        """Whether the table's rejected rows become dead letters instead of failing the copy."""
        return self._places.dead_letters.diverts(self.name)

    def invalidate(self, reason: str) -> None:
        """Discard the chunks read so far. The next `open` makes a new plan."""
        if self._invalid_reason is None:
            self.back_off()
        self._invalid_reason = reason

    def back_off(self) -> None:
        """Postpone the table to a later round, after a pause."""
        self.restarts_at = time.monotonic() + self.restarts.fail()

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self.restarts_at

    @property
    def is_lockable(self) -> bool:
        """Whether the table may be copied under a lock, in one transaction. This requires that an earlier
        copy was interrupted, that the table is small, and that its transform does not need Spark.
        """
        is_asked = (
            self._plan is not None
            and isinstance(self._places.sink, AskingSink)
            and self._asks(self._places.sink)
        )
        return (
            self.restarts.failures > 0
            and self._plan is not None
            and self._plan.heap_bytes <= _LOCKED_BYTES
            and not is_asked
        )

    def _asks(self, sink: AskingSink) -> bool:
        return sink.asker_for(self.plan.outline.schema) is not None

    def chunk_bytes(self, number: int) -> int:
        return self.plan.chunks[number].heap_bytes if number >= 0 else 0

    def _announce_restart(self, reason: str) -> None:
        self._places.observer.announced(f"the snapshot of {self.name} starts again: {reason}")

    @property
    def _missing(self) -> list[int]:
        return [number for number in range(len(self.plan.chunks)) if number not in self._records]

    def _restart_reason(
        self, saved: SavedSnapshot, found: MeasuredTable, exported: ExportedSnapshot
    ) -> str | None:
        """Return the reason why the chunks read so far cannot be used; None if they can be used."""
        plan = saved.plan
        difference = plan.outline.difference(found.outline)
        if difference is not None:
            return difference
        if not self._places.sink.can_resume_snapshot(
            plan.outline.schema, plan.place, [record.file for record in saved.records.values()]
        ):
            return "files that were written to the target no longer exist"
        start = SpoolReader(self._places.spool).start
        if start is not None and start > plan.fence:
            return f"the spool no longer has the changes after {plan.fence}"
        if not saved.missing and len(saved.fences) == 1:
            return None
        if plan.fence > exported.fence:
            return f"it began at {plan.fence}, but the server is now at an earlier position, {exported.fence}"
        if not is_repairable(plan.outline.schema):
            return "its rows cannot be read by key"
        return None

    def _begin(self, found: MeasuredTable, exported: ExportedSnapshot) -> None:
        places = self._places
        places.store.forget(self.name)
        size = chunk_bytes(found.total_bytes, places.chunk_bytes, places.lanes)
        place = places.sink.begin_snapshot(found.outline.schema, exported.fence)
        chunks = tuple(cut_chunks(found, size))
        self._plan = SnapshotPlan(
            new_plan_id(), found.outline, exported.fence, place, chunks, datetime.now(UTC)
        )
        self._records = {}
        places.store.begin(self._plan)
        _log.info(
            "snapshot planned",
            extra={
                "table": str(self.name),
                "plan": self._plan.id,
                "chunks": len(chunks),
                "fence": str(exported.fence),
            },
        )
        places.observer.snapshot_planned(self.name, len(chunks), self._plan.heap_bytes)

    def _resume(self, saved: SavedSnapshot, outline: CopyFingerprint) -> None:
        """Resume the stored plan. `outline` describes the table as it is now. The caller has checked that the
        plan matches it.
        """
        observer, plan = self._places.observer, saved.plan.with_outline(outline)
        self._plan, self._records = plan, dict(saved.records)
        facts = {
            "table": str(self.name),
            "plan": plan.id,
            "done": len(saved.records),
            "chunks": len(plan.chunks),
        }
        _log.info("snapshot resumed", extra=facts)
        observer.snapshot_planned(self.name, len(plan.chunks), plan.heap_bytes)
        observer.snapshot_resumed(self.name, len(saved.records), len(plan.chunks))
        progress = self.progress
        observer.snapshot_advanced(self.name, progress.chunks_done, progress.rows, progress.heap_bytes_done)


def chunk_bytes(total_bytes: int, largest_bytes: int, lanes: int) -> int:
    """Return the heap bytes per chunk: at most `largest_bytes`. They are fewer if the table would otherwise
    have fewer than `_CHUNKS_A_LANE` chunks for each of the `lanes` threads.
    """
    return min(largest_bytes, max(_SMALLEST_CHUNK_BYTES, total_bytes // (_CHUNKS_A_LANE * lanes)))
