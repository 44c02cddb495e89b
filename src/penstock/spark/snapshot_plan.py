"""The plan of a stream's snapshot: which heap blocks are read, in which order, and how the plan continues
after the exported snapshot was lost.

A plan is a list of steps; an offset has the number of completed steps. The plan is stored in the spool, so
that another process can repeat a batch, and completed steps are not repeated. It does not contain the names
of exported snapshots, which end with their connection.

When a snapshot is lost, the remaining steps are read under a new one, later than the fence. No change is
lost, since the stream of changes starts at the fence in any case. But a row may have moved from an unread
block to a block that was already read, and the changes lack its unchanged TOAST values. So the new plan ends
with a second read of all blocks that were already read. It returns only the few rows that were written since
the first snapshot. A heap that was rewritten is read again completely.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from penstock import storage
from penstock.errors import SpoolCorruptError
from penstock.position import Position
from penstock.schema import TableName
from penstock.spool.manifest import parse_document

_FORMAT = 1
ROW_BYTES = 64
"""Assumed heap size of a row, which converts a limit on rows to a limit on bytes."""


@dataclass(frozen=True, slots=True)
class Heap:
    """An ordinary table, or a partition of `table`."""

    table: TableName
    oid: int
    filenode: int


@dataclass(frozen=True, slots=True)
class Step:
    """Blocks `first` to `last` (exclusive; None: to the end) of one heap.

    `is_second`: a second read, only of rows written since `SnapshotPlan.horizon`.
    """

    heap: Heap
    first: int
    last: int | None
    heap_bytes: int
    is_second: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """Steps of a snapshot. `horizon` is the id of the oldest transaction that was open at the first snapshot:
    rows written since then have this transaction id or a later one.
    """

    fence: Position
    horizon: int
    steps: tuple[Step | None, ...]
    """An empty step is None."""
    replans: int = 0
    last: Position | None = None
    """WAL position of the last exported snapshot, if there were several. After the changes up to this
    position, all rows are consistent.
    """
    keyless: int = 0
    """Number of initial steps that read heaps without a key. All of them must be read under the first
    snapshot.
    """

    def admit(self, done: int, max_rows: int | None, max_bytes: int | None) -> int:
        """The number of steps that are completed after the next batch. The batch has at least one step, if
        any remain.

        Heaps without a key are read in separate batches, so that a change of another heap never makes it
        necessary to read rows without a key again.
        """
        limits = [
            limit
            for limit in (max_bytes, max_rows * ROW_BYTES if max_rows is not None else None)
            if limit is not None
        ]
        limit, total = min(limits, default=None), 0
        end = self.keyless if done < self.keyless else len(self.steps)
        for number in range(done, end):
            step = self.steps[number]
            total += step.heap_bytes if step is not None and not step.is_second else 0
            if limit is not None and total > limit and number > done:
                return number
        return end

    @property
    def keyless_bytes(self) -> int:
        return sum(step.heap_bytes for step in self.steps[: self.keyless] if step is not None)

    def replan(
        self,
        done: int,
        heaps: Mapping[int, Sequence[Step]],
        keyless: Collection[int] = (),
        *,
        upto: int | None = None,
        now: Position | None = None,
    ) -> SnapshotPlan:
        """The plan after the first `done` steps, continued under a new snapshot taken at `now`.

        `heaps` has the current steps of each heap, by OID.

        The batch from `done` to `upto` may already be in the sink, which then skips its repetition. So the
        new plan counts this batch as delivered: its steps keep their indexes (and become empty if the heap
        was rewritten), and all other steps follow it. If `upto` is None, the batch has all remaining steps.
        Its steps may then change: if the sink has the batch, the snapshot is complete.

        No step of a `keyless` heap may remain, since the rows of such a heap are as of the fence and are not
        read again. The plan never becomes shorter, since a batch that was planned before must end at the same
        index.
        """
        first = done if upto is None else upto
        known = {step.heap for step in self.steps if step is not None and step.heap.oid not in keyless}
        gone = {heap for heap in known if not _is_unchanged(heap, heaps)}
        # If the plan already has steps of the heap as it is after the rewrite, the plan keeps those steps.
        rewritten = {heap.oid for heap in gone} - {heap.oid for heap in known - gone}
        repeated = [None if step is None or step.heap in gone else step for step in self.steps[done:first]]
        left = [
            step
            for step in self.steps[first:]
            if step is not None and not step.is_second and step.heap not in gone
        ]
        anew = [step for oid in sorted(rewritten) for step in heaps.get(oid, ())]
        taken = [
            step
            for step in self.steps[:first]
            if step is not None and not step.is_second and step.heap not in gone
        ]
        second = [replace(step, is_second=True) for step in taken if step.heap.oid not in keyless]
        steps = (*self.steps[:done], *repeated, *left, *anew, *second)
        void = (None,) * max(0, len(self.steps) - len(steps))
        return replace(self, steps=steps + void, replans=self.replans + 1, last=now or self.last)


def _is_unchanged(heap: Heap, heaps: Mapping[int, Sequence[Step]]) -> bool:
    return any(step.heap.filenode == heap.filenode for step in heaps.get(heap.oid, ()))


def store_plan(root: Path, consumer: str, plan: SnapshotPlan) -> None:
    """Store the plan durably."""
    heaps = list(dict.fromkeys(step.heap for step in plan.steps if step is not None))
    places = {heap: place for place, heap in enumerate(heaps)}
    document = {
        "format": _FORMAT,
        "consumer": consumer,
        "fence": str(plan.fence),
        "horizon": plan.horizon,
        "renewals": plan.replans,
        "last": None if plan.last is None else str(plan.last),
        "keyless": plan.keyless,
        "heaps": [[str(heap.table), heap.oid, heap.filenode] for heap in heaps],
        "steps": [None if step is None else _step_document(step, places[step.heap]) for step in plan.steps],
    }
    storage.put(_path(root, consumer), json.dumps(document, separators=(",", ":")).encode())


def load_plan(root: Path, consumer: str) -> SnapshotPlan | None:
    path = _path(root, consumer)
    data = storage.read(path)
    if data is None:
        return None
    document = parse_document(data, where=f"snapshots/{path.name}")
    try:
        heaps = [Heap(TableName.parse(table), oid, filenode) for table, oid, filenode in document["heaps"]]
        steps = tuple(None if step is None else _parse_step(step, heaps) for step in document["steps"])
        last = document.get("last")  # missing in plans of earlier versions
        return SnapshotPlan(
            Position.parse(document["fence"]),
            int(document["horizon"]),
            steps,
            int(document["renewals"]),
            None if last is None else Position.parse(last),
            int(document.get("keyless", 0)),
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise SpoolCorruptError(
            f"snapshots/{path.name} is not a snapshot plan",
            hint="start a new query, with a new checkpoint and a new target",
        ) from error


def _step_document(step: Step, place: int) -> list[Any]:
    return [place, step.first, step.last, step.heap_bytes, int(step.is_second)]


def _parse_step(document: Sequence[Any], heaps: Sequence[Heap]) -> Step:
    place, first, last, heap_bytes, is_second = document
    return Step(
        heaps[place], int(first), None if last is None else int(last), int(heap_bytes), bool(is_second)
    )


def _path(root: Path, consumer: str) -> Path:
    return root / "snapshots" / f"{quote(consumer, safe='')}.json"
