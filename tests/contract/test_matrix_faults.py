"""Every sink in every mode, and everything that can go wrong with an epoch: what a table holds is what its position says, always."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from penstock.change import Transactions
from penstock.errors import PenstockError, Recovery, SinkError, SinkRefusedError
from penstock.pipeline import error_policy
from penstock.pipeline.apply import EpochApplier
from penstock.pipeline.epochs import EpochLog
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.states import TableState
from penstock.pipeline.tables import Selection, inspect_pipeline
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import Sink, TableChanges, Target
from penstock.sinks.layout import Mode
from penstock.spool import SpoolWriter
from tests.contract.dying import Death, dying
from tests.contract.places import FILES, MERGED, PIPELINE, SPARK, InlineExecutors, NewPlace, Place, cells, parameters
from tests.contract.shapes import INDEXED
from tests.contract.workshop import FIRST, Busy, BusyHeap, Emptied, Growing, Workshop
from tests.integration.sinks.source import whole

SECOND = replace(INDEXED, name=TableName("public", "other"), oid=16402)
# What most tables are; and a log, which shows best what is there twice.
mirror_and_log_of_each_sink = pytest.mark.parametrize("cell", parameters(cells(Mode.APPEND, Mode.MIRROR)))
_EPOCHS = [
    *((cell, Busy) for cell in cells(*Mode)),
    *((cell, Busy) for cell in cells(Mode.MIRROR, Mode.HISTORY, of=[MERGED])),
    # Rows that only come are added in a way of their own; so it is with all that go at once, and with those that nothing tells apart.
    *((cell, kind) for cell in cells(Mode.MIRROR, of=["delta", "iceberg", "postgres"]) for kind in (Growing, Emptied, BusyHeap)),
    *((cell, Emptied) for cell in cells(Mode.HISTORY, of=["delta", "iceberg", "postgres"])),
]
every_epoch = pytest.mark.parametrize(
    ("cell", "kind"),
    [pytest.param(cell, kind, id=f"{cell[0]}-{cell[1]}-{kind.__name__}", marks=SPARK.get(cell[0], [])) for cell, kind in _EPOCHS],
)


@every_epoch
def test_K01_a_repeated_epoch_an_older_one_and_one_that_overlaps_change_nothing(workshop: Workshop) -> None:
    begun = workshop.target()
    ends = [workshop.work() for _ in range(4)]
    workshop.follow(ends[1])
    workshop.follow(ends[2], begun)
    for end in (ends[0], ends[1], ends[2]):
        workshop.follow(end, begun)
    assert workshop.target().applied == ends[2]
    workshop.assert_exact()
    workshop.go_on_elsewhere()
    workshop.follow(ends[1], begun)
    workshop.follow(ends[3], begun)
    assert workshop.target().applied == ends[3]
    workshop.assert_exact()


@every_epoch
def test_K01_a_process_that_dies_between_any_two_steps_leaves_an_epoch_whole_or_not_at_all(workshop: Workshop) -> None:
    """It dies at its first step, at the second, and so on; each time another goes on with the same epoch, and is let live."""
    for last in count(1):
        before = workshop.target()
        end = workshop.work()
        with dying(workshop.place.seams, last) as life:
            workshop.follow(end, before)
        workshop.go_on_elsewhere()
        assert workshop.target().applied in ((before.applied, end) if life.is_over else (end,))
        workshop.assert_exact()
        workshop.follow(end, before)
        assert workshop.target().applied == end
        if not life.is_over:
            assert last > 2, "an epoch takes more steps than that"
            return


@pytest.mark.parametrize("cell", parameters(cells(Mode.MIRROR, of=["delta", "parquet"])))
def test_C07_a_disk_that_is_full_at_any_step_is_told_and_the_epoch_is_done_when_it_has_room(workshop: Workshop) -> None:
    for last in count(1):
        before = workshop.target()
        end = workshop.work()
        with dying(FILES, last, OSError(errno.ENOSPC, "No space left on device")) as life:
            if (told := _told(lambda: workshop.follow(end, before))) is not None:  # noqa: B023 - it is done at once
                assert told.recovery is Recovery.RETRY
        assert workshop.target().applied in ((before.applied, end) if life.is_over else (end,))
        workshop.assert_exact()
        workshop.follow(end, before)
        assert workshop.target().applied == end
        if not life.is_over:
            return


@mirror_and_log_of_each_sink
@pytest.mark.parametrize("is_ahead", [False, True], ids=["the same epoch", "a longer one"])
def test_K16_an_attempt_that_is_slow_and_was_given_up_adds_nothing_to_what_came_after_it(workshop: Workshop, is_ahead: bool) -> None:
    """It stands still with its tasks handed out, while another process does its epoch, and the next."""
    begun, slow = workshop.target(), workshop.sink
    first, second = workshop.work(), workshop.work()

    def others() -> None:
        workshop.go_on_elsewhere()
        if not is_ahead:
            workshop.follow(first, begun)
        workshop.follow(second, begun)
        workshop.sink.close()

    executors = InlineExecutors()
    executors.interlude = _once(others)
    workshop.place.executed_by(slow, executors)
    assert begun.applied is not None
    with suppress(PenstockError):  # it may notice, or find that all is done
        slow.apply(begun, workshop.changes(begun.applied, first), first)
    slow.close()
    workshop.sink = workshop.place.open(workshop.mode)
    assert workshop.target().applied == second
    workshop.assert_exact()


def _told(work: Callable[[], None]) -> PenstockError | None:
    try:
        work()
    except PenstockError as error:
        return error
    return None


def _once(action: Callable[[], None]) -> Callable[[], None]:
    waiting = [action]

    def act() -> None:
        if waiting:
            waiting.pop()()

    return act


# two tables, one epoch --------------------------------------------------------------------------------------------------------------


class House:
    """Two tables of one pipeline, whose changes commit in the same transactions."""

    def __init__(self, place: Place, mode: Mode) -> None:
        self.place, self.mode, self.sink = place, mode, place.open(mode)
        self.first, self.second = (Workshop(place, self.sink, mode, shape) for shape in (FIRST, SECOND))
        self.spool, self.log = place.root / "spool", EpochLog(place.root / "epochs", PIPELINE)
        (place.root / "epochs").mkdir()
        self.writer = SpoolWriter(self.spool, Position.of(self.first.source.fence))
        self.applier = self.start()

    def start(self) -> EpochApplier:
        """As another process does."""
        self.sink.close()
        self.sink = self.first.sink = self.second.sink = self.place.open(self.mode)
        schemas = {each.table.name: each.table for each in (self.first, self.second)}
        found = inspect_pipeline(Selection({}, schemas, {}), self.sink, self.log.last())
        self.applier = EpochApplier(self.sink, self.log, self.spool, consumer="p", system="1/1", observer=PipelineObserver())
        self.applier.adopt(found.targets, found.statuses)
        return self.applier

    def work(self) -> Position:
        for each in (self.first, self.second):
            each.busy.work()
        steps = [whole(each.table, each.busy.log[-1:]) for each in (self.first, self.second)]
        batches = [batch for step in steps if isinstance(step, Transactions) for batch in step.batches]
        assert isinstance(steps[0], Transactions)
        self.writer.append(replace(steps[0], batches=tuple(batches)))
        self.writer.seal()
        return Position.of(self.first.busy.position)

    def assert_exact(self, first: Position, second: Position) -> None:
        for each, position in ((self.first, first), (self.second, second)):
            assert each.target().applied == position
            each.assert_exact()


@pytest.fixture
def house(cell: tuple[str, Mode], new_place: NewPlace, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(error_policy, "FIRST_SECONDS", 0.0)
    made = House(new_place(cell[0]), cell[1])
    yield made
    made.sink.close()


Fault = Callable[[Callable[[], None]], None]
"""What becomes of an epoch of the second table, which is done by the argument."""


@contextmanager
def failing(sink: Sink, fault: Fault) -> Iterator[None]:
    apply = sink.apply

    def scripted(target: Target, changes: TableChanges, end: Position) -> None:
        if target.table == SECOND.name:
            fault(lambda: apply(target, changes, end))
        else:
            apply(target, changes, end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink, "apply", scripted)
        yield


def refuse(_: Callable[[], None]) -> None:
    raise SinkRefusedError("no", hint="mend it")


def be_away(_: Callable[[], None]) -> None:
    raise SinkError("nobody answers")


def die(_: Callable[[], None]) -> None:
    raise Death


def die_unheard(work: Callable[[], None]) -> None:
    work()
    raise Death


@mirror_and_log_of_each_sink
def test_K06_a_table_that_is_refused_fails_alone_and_the_other_gets_to_the_epoch_s_end(house: House) -> None:
    begun, end = house.applier.position, house.work()
    assert begun == Position.ZERO
    with failing(house.sink, refuse):
        house.applier.apply(end)
        later = house.work()
        house.applier.apply(later)
    status = house.applier.statuses[SECOND.name]
    assert (status.state, status.remedy) == (TableState.FAILED, "mend it")
    assert house.applier.statuses[FIRST.name].state is TableState.STREAMING
    assert house.log.last().position == later  # type: ignore[union-attr]
    house.assert_exact(later, Position.of(house.second.source.fence))


@mirror_and_log_of_each_sink
@pytest.mark.parametrize("fault", [die, die_unheard], ids=lambda fault: fault.__name__)
def test_K06_an_epoch_that_ends_in_the_middle_is_not_recorded_and_is_completed_by_the_next_run(house: House, fault: Fault) -> None:
    end = house.work()
    with failing(house.sink, fault), pytest.raises(Death):
        house.applier.apply(end)
    assert house.log.last() is None
    fence = Position.of(house.second.source.fence)
    house.assert_exact(end, end if fault is die_unheard else fence)
    house.start().apply(end)
    later = house.work()
    house.applier.apply(later)
    assert house.log.last().position == later  # type: ignore[union-attr]
    house.assert_exact(later, later)


@mirror_and_log_of_each_sink
def test_K06_a_table_that_is_away_for_an_epoch_takes_in_what_it_missed_with_the_next(house: House) -> None:
    end, fence = house.work(), Position.of(house.second.source.fence)
    with failing(house.sink, be_away):
        house.applier.apply(end)
    house.assert_exact(end, fence)
    assert house.applier.statuses[SECOND.name].state is TableState.RETRYING
    later = house.work()
    house.applier.apply(later)
    house.assert_exact(later, later)


@mirror_and_log_of_each_sink
def test_K06_an_answer_that_is_lost_once_is_made_good_in_the_same_epoch(house: House) -> None:
    attempts: list[int] = []

    def lose_the_first(work: Callable[[], None]) -> None:
        work()
        attempts.append(1)
        if len(attempts) == 1:
            raise SinkError("the answer was lost")

    end = house.work()
    with failing(house.sink, lose_the_first):
        house.applier.apply(end)
    assert len(attempts) == 2
    house.assert_exact(end, end)


@mirror_and_log_of_each_sink
def test_a_checkpoint_or_a_record_of_epochs_that_is_out_of_date_changes_nothing(house: House, tmp_path: Path) -> None:
    ends = [house.work() for _ in range(3)]
    house.applier.apply(ends[0])
    shutil.copytree(house.place.root / "epochs", tmp_path / "old")
    house.applier.apply(ends[2])
    house.applier.apply(ends[1])
    house.assert_exact(ends[2], ends[2])
    for put_back in (lambda: shutil.copytree(tmp_path / "old", house.place.root / "epochs"), lambda: None):
        shutil.rmtree(house.place.root / "epochs")
        put_back()
        (house.place.root / "epochs").mkdir(exist_ok=True)
        for end in (ends[0], ends[1], ends[2]):
            house.start().apply(end)
        assert house.log.last().position == ends[2]  # type: ignore[union-attr]
        house.assert_exact(ends[2], ends[2])
