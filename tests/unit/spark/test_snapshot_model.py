"""Snapshots of a stream against a model: heaps that change while they are read, and sinks that skip a batch
they have.

A row that is only moved carries none of its long value in the log, so that value comes from the snapshot
only: every row that existed at the fence and still exists must be in a batch that a sink has kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from penstock.position import Position
from penstock.schema import TableName
from penstock.spark.snapshot_plan import Heap, SnapshotPlan, Step

BLOCKS = 5
ROWS = 6
OIDS = (1, 2)

Place = tuple[int, int]
"""A heap and a block of it."""


@dataclass
class Source:
    """Rows and their blocks; a snapshot is a copy of both."""

    places: list[Place]
    moved: set[int] = field(default_factory=set)
    filenodes: dict[int, int] = field(default_factory=lambda: dict.fromkeys(OIDS, 100))

    def heaps(self) -> dict[int, list[Step]]:
        return {
            oid: [
                Step(
                    Heap(TableName("public", f"t{oid}"), oid, self.filenodes[oid]),
                    first,
                    None if first == BLOCKS - 1 else first + 1,
                    1,
                )
                for first in range(BLOCKS)
            ]
            for oid in OIDS
        }

    def move(self, row: int, block: int) -> None:
        oid, _ = self.places[row]
        self.places[row] = (oid, block)
        self.moved.add(row)

    def rewrite(self, oid: int) -> None:
        """Move rows to other blocks."""
        self.filenodes[oid] += 1
        self.places = [
            (heap, (block * 3 + 1) % BLOCKS) if heap == oid else (heap, block) for heap, block in self.places
        ]


@dataclass
class Query:
    """Spark with a sink: the planned batch, the committed batches, and the sink's rows."""

    source: Source
    plan: SnapshotPlan
    held: list[Place] | None
    moved_at: set[int]
    kept: dict[int, set[int]] = field(default_factory=dict)
    number: int = 0
    done: int = 0
    upto: int | None = None
    is_planned: bool = False

    def run(self, size: int, *, keeps: bool, commits: bool) -> None:
        """One batch: the previously planned one, if its end was not recorded."""
        if not self.is_planned:
            reach = min(len(self.plan.steps), self.done + size)
            self.upto, self.is_planned = (None if reach == len(self.plan.steps) else reach), True
        rows = self.read()
        if keeps:
            self.kept.setdefault(self.number, rows)
        if commits:
            self.kept.setdefault(self.number, rows)
            self.done = len(self.plan.steps) if self.upto is None else self.upto
            self.number, self.is_planned = self.number + 1, False
        else:
            self.held = None  # the process ended, and its snapshot with it

    def read(self) -> set[int]:
        wanted = [step for step in self.plan.steps[self.done : self.upto] if step is not None]
        if self.held is None or any(
            self.source.filenodes[step.heap.oid] != step.heap.filenode for step in wanted
        ):
            self.plan = self.plan.replan(self.done, self.source.heaps(), upto=self.upto)
            self.held, self.moved_at = list(self.source.places), set(self.source.moved)
        held = self.held
        wanted = [step for step in self.plan.steps[self.done : self.upto] if step is not None]
        return {
            row
            for row, place in enumerate(held)
            for step in wanted
            if place == (step.heap.oid, step.first) and (not step.is_second or row in self.moved_at)
        }

    @property
    def is_over(self) -> bool:
        return not self.is_planned and self.done == len(self.plan.steps)


EVENTS = st.one_of(
    st.tuples(st.just("batch"), st.integers(1, 4), st.sampled_from(["commits", "keeps", "dies"])),
    st.tuples(st.just("move"), st.integers(0, ROWS - 1), st.integers(0, BLOCKS - 1)),
    st.tuples(st.just("rewrite"), st.sampled_from(OIDS), st.just(0)),
    st.tuples(st.just("lose"), st.just(0), st.just(0)),
)
PLACES = st.lists(st.tuples(st.sampled_from(OIDS), st.integers(0, BLOCKS - 1)), min_size=ROWS, max_size=ROWS)


@given(PLACES, st.lists(EVENTS, max_size=25))
def test_every_row_is_in_a_batch_that_the_sink_kept_after_any_crash_between_sink_and_commit(
    places: list[Place], events: list[tuple[str, int, object]]
) -> None:
    source = Source(places)
    whole = [step for heap in source.heaps().values() for step in heap]
    query = Query(source, SnapshotPlan(Position.of(77), 1, tuple(whole)), list(places), set())
    for kind, number, what in events:
        if kind == "move":
            assert isinstance(what, int)
            source.move(number, what)
        elif kind == "rewrite":
            source.rewrite(number)
        elif kind == "lose":
            query.held = None
        elif not query.is_over:
            query.run(number, keeps=what == "keeps", commits=what == "commits")
    while not query.is_over:
        query.run(3, keeps=True, commits=True)
    assert set().union(*query.kept.values()) == set(range(ROWS))
