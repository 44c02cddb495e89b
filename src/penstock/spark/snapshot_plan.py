"""The plan of a stream's snapshot: which blocks of which heaps are read, in which order, and how that goes on after the snapshot was lost.

A plan is a list of steps; an offset says how many of them are done. The plan outlives the process that made it, in a file of the spool, so
that a batch can be repeated and finished steps are not taken again. It says nothing of snapshots by name: these die with their connection.

When a snapshot is lost, the steps that are left are taken under a new one, later than the fence. Nothing is missed by that, since live
changes begin at the fence all the same; but a row may have moved, between the two snapshots, from a block that is still to be read to one
that has been read, and if a part of it lies out of line (TOAST), no change carries that part. So a renewed plan ends with a second look at
all blocks that were read before: only for rows written since the fence, of which there are few. A heap that was rewritten meanwhile is read
again as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from penstock.errors import SpoolCorruptError
from penstock.position import Position
from penstock.schema import TableName
from penstock.spool import storage
from penstock.spool.manifest import parse_document

_FORMAT = 1
ROW_BYTES = 64
"""What a row is taken for, in bytes of heap, where batches are bounded by rows."""


@dataclass(frozen=True, slots=True)
class Heap:
    """An ordinary table, or a partition of `table`."""

    table: TableName
    oid: int
    filenode: int


@dataclass(frozen=True, slots=True)
class Step:
    """Blocks `first` to `last` (exclusive; None: to the end) of one heap. `is_second`: only rows written since the fence."""

    heap: Heap
    first: int
    last: int | None
    heap_bytes: int
    is_second: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """`horizon` is the oldest transaction that the first snapshot did not see the end of: rows written since carry it, or a later one."""

    fence: Position
    horizon: int
    steps: tuple[Step | None, ...]
    """None where a step has become void."""
    renewals: int = 0
    last: Position | None = None
    """Where the log stood at the last of several snapshots: with the changes up to there, all rows are of one moment."""
    keyless: int = 0
    """How many steps there are, from the first on, of heaps without a key. They must all be taken under the first snapshot."""

    def admit(self, done: int, max_rows: int | None, max_bytes: int | None) -> int:
        """How many steps may be done after the next batch; at least one more, if there is one.

        Heaps without a key are in batches of their own, so that nothing which happens to another heap has a batch with them repeated.
        """
        limits = [limit for limit in (max_bytes, max_rows * ROW_BYTES if max_rows is not None else None) if limit is not None]
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

    def renew(
        self,
        done: int,
        heaps: Mapping[int, Sequence[Step]],
        keyless: Collection[int] = (),
        *,
        upto: int | None = None,
        now: Position | None = None,
    ) -> SnapshotPlan:
        """What follows the first `done` steps under a new snapshot, taken at `now`.

        `heaps` holds the steps that each heap would have by then, by its OID.

        The batch up to `upto` may have been handed out before, and a sink that holds it passes over its repetition. So it counts as taken
        and its steps keep their places, void where the heap was rewritten; whatever else is to be read comes after it. None: the batch
        has all steps that there are, however many come to be; if it was handed out before, nothing was left.

        Of `keyless` heaps, no step may be left: what was read of them is as of the fence, and is not looked at again. The plan is never
        shorter than it was: a batch that was planned before reaches to the same number.
        """
        first = done if upto is None else upto
        known = {step.heap for step in self.steps if step is not None and step.heap.oid not in keyless}
        gone = {heap for heap in known if not _stands(heap, heaps)}
        # One that was rewritten before, and not since, stands by its later steps.
        rewritten = {heap.oid for heap in gone} - {heap.oid for heap in known - gone}
        repeated = [None if step is None or step.heap in gone else step for step in self.steps[done:first]]
        left = [step for step in self.steps[first:] if step is not None and not step.is_second and step.heap not in gone]
        anew = [step for oid in sorted(rewritten) for step in heaps.get(oid, ())]
        taken = [step for step in self.steps[:first] if step is not None and not step.is_second and step.heap not in gone]
        second = [replace(step, is_second=True) for step in taken if step.heap.oid not in keyless]
        steps = (*self.steps[:done], *repeated, *left, *anew, *second)
        void = (None,) * max(0, len(self.steps) - len(steps))
        return replace(self, steps=steps + void, renewals=self.renewals + 1, last=now or self.last)


def _stands(heap: Heap, heaps: Mapping[int, Sequence[Step]]) -> bool:
    return any(step.heap.filenode == heap.filenode for step in heaps.get(heap.oid, ()))


def store_plan(root: Path, consumer: str, plan: SnapshotPlan) -> None:
    """Durable when it returns."""
    heaps = list(dict.fromkeys(step.heap for step in plan.steps if step is not None))
    places = {heap: place for place, heap in enumerate(heaps)}
    document = {
        "format": _FORMAT,
        "consumer": consumer,
        "fence": str(plan.fence),
        "horizon": plan.horizon,
        "renewals": plan.renewals,
        "last": None if plan.last is None else str(plan.last),
        "keyless": plan.keyless,
        "heaps": [[str(heap.table), heap.oid, heap.filenode] for heap in heaps],
        "steps": [None if step is None else _step_document(step, places[step.heap]) for step in plan.steps],
    }
    storage.replace_bytes(_path(root, consumer), json.dumps(document, separators=(",", ":")).encode())


def load_plan(root: Path, consumer: str) -> SnapshotPlan | None:
    path = _path(root, consumer)
    data = storage.read_bytes(path)
    if data is None:
        return None
    document = parse_document(data, where=f"snapshots/{path.name}")
    try:
        heaps = [Heap(TableName.parse(table), oid, filenode) for table, oid, filenode in document["heaps"]]
        steps = tuple(None if step is None else _parse_step(step, heaps) for step in document["steps"])
        last = document.get("last")  # earlier versions did not say
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
            f"snapshots/{path.name} holds no plan", hint="start the query anew, with a new checkpoint and into a new target"
        ) from error


def _step_document(step: Step, place: int) -> list[Any]:
    return [place, step.first, step.last, step.heap_bytes, int(step.is_second)]


def _parse_step(document: Sequence[Any], heaps: Sequence[Heap]) -> Step:
    place, first, last, heap_bytes, is_second = document
    return Step(heaps[place], int(first), None if last is None else int(last), int(heap_bytes), bool(is_second))


def _path(root: Path, consumer: str) -> Path:
    return root / "snapshots" / f"{quote(consumer, safe='')}.json"
