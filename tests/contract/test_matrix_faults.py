"""Crashes, repeated epochs and errors in every table mode of every sink: a target holds what its applied
position says.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

from penstock.errors import PenstockError, Recovery, SinkError, SinkRefusedError
from penstock.pipeline import error_policy
from penstock.pipeline.table_states import TableState
from penstock.position import Position
from penstock.sinks.base import Sink, TableChanges, Target
from penstock.sinks.modes import Mode
from tests.support.contract.crash_table import FIRST, Busy, BusyHeap, CrashTable, Emptied, Growing
from tests.support.contract.dying import Death, dying
from tests.support.contract.sink_setups import (
    FILES,
    MERGED,
    SPARK,
    InlineExecutors,
    NewSinkSetup,
    cells,
    parameters,
)
from tests.support.contract.two_tables import SECOND, TwoTables

# A mirror, the usual mode; and a log, which shows repeated rows best.
mirror_and_log_of_each_sink = pytest.mark.parametrize("cell", parameters(cells(Mode.APPEND, Mode.MIRROR)))
_EPOCHS = [
    *((cell, Busy) for cell in cells(*Mode)),
    *((cell, Busy) for cell in cells(Mode.MIRROR, Mode.HISTORY, of=[MERGED])),
    # Epochs of inserts only, of a truncate, and of keyless rows take separate paths.
    *(
        (cell, kind)
        for cell in cells(Mode.MIRROR, of=["delta", "iceberg", "postgres"])
        for kind in (Growing, Emptied, BusyHeap)
    ),
    *((cell, Emptied) for cell in cells(Mode.HISTORY, of=["delta", "iceberg", "postgres"])),
]
every_epoch = pytest.mark.parametrize(
    ("cell", "kind"),
    [
        pytest.param(cell, kind, id=f"{cell[0]}-{cell[1]}-{kind.__name__}", marks=SPARK.get(cell[0], []))
        for cell, kind in _EPOCHS
    ],
)


@every_epoch
def test_K01_a_repeated_epoch_an_older_one_and_one_that_overlaps_change_nothing(
    crash_table: CrashTable,
) -> None:
    begun = crash_table.target()
    ends = [crash_table.work() for _ in range(4)]
    crash_table.follow(ends[1])
    crash_table.follow(ends[2], begun)
    for end in (ends[0], ends[1], ends[2]):
        crash_table.follow(end, begun)
    assert crash_table.target().applied == ends[2]
    crash_table.assert_exact()
    crash_table.go_on_elsewhere()
    crash_table.follow(ends[1], begun)
    crash_table.follow(ends[3], begun)
    assert crash_table.target().applied == ends[3]
    crash_table.assert_exact()


@every_epoch
def test_K01_a_process_that_dies_between_any_two_steps_leaves_an_epoch_whole_or_not_at_all(
    crash_table: CrashTable,
) -> None:
    """The process dies at its first step, at its second, and so on; each time a new process applies the same
    epoch.
    """
    for last in count(1):
        before = crash_table.target()
        end = crash_table.work()
        with dying(crash_table.setup.seams, last) as counter:
            crash_table.follow(end, before)
        crash_table.go_on_elsewhere()
        assert crash_table.target().applied in ((before.applied, end) if counter.is_over else (end,))
        crash_table.assert_exact()
        crash_table.follow(end, before)
        assert crash_table.target().applied == end
        if not counter.is_over:
            assert last > 2, "an epoch takes more steps than that"
            return


@pytest.mark.parametrize("cell", parameters(cells(Mode.MIRROR, of=["delta", "parquet"])))
def test_C07_a_full_disk_at_any_step_is_reported_and_the_epoch_succeeds_when_there_is_room(
    crash_table: CrashTable,
) -> None:
    for last in count(1):
        before = crash_table.target()
        end = crash_table.work()
        with dying(FILES, last, OSError(errno.ENOSPC, "No space left on device")) as counter:
            if (told := _told(lambda: crash_table.follow(end, before))) is not None:  # noqa: B023 - it is done at once
                assert told.recovery is Recovery.RETRY
        assert crash_table.target().applied in ((before.applied, end) if counter.is_over else (end,))
        crash_table.assert_exact()
        crash_table.follow(end, before)
        assert crash_table.target().applied == end
        if not counter.is_over:
            return


@mirror_and_log_of_each_sink
@pytest.mark.parametrize("is_ahead", [False, True], ids=["the same epoch", "a longer one"])
def test_K16_a_slow_abandoned_attempt_adds_nothing_after_its_successor(
    crash_table: CrashTable, is_ahead: bool
) -> None:
    """The process pauses after handing out tasks, while another one applies this epoch and the next."""
    begun, slow = crash_table.target(), crash_table.sink
    first, second = crash_table.work(), crash_table.work()

    def others() -> None:
        crash_table.go_on_elsewhere()
        if not is_ahead:
            crash_table.follow(first, begun)
        crash_table.follow(second, begun)
        crash_table.sink.close()

    executors = InlineExecutors()
    executors.interlude = _once(others)
    crash_table.setup.executed_by(slow, executors)
    assert begun.applied is not None
    with suppress(PenstockError):  # it may raise an error, or find that the epoch is applied
        slow.apply(begun, crash_table.changes(begun.applied, first), first)
    slow.close()
    crash_table.sink = crash_table.setup.open(crash_table.mode)
    assert crash_table.target().applied == second
    crash_table.assert_exact()


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


# two tables, one epoch
# ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_tables(
    cell: tuple[str, Mode], new_setup: NewSinkSetup, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TwoTables]:
    monkeypatch.setattr(error_policy, "FIRST_SECONDS", 0.0)
    made = TwoTables(new_setup(cell[0]), cell[1])
    yield made
    made.sink.close()


Fault = Callable[[Callable[[], None]], None]
"""How an epoch of the second table fails. The argument applies the epoch."""


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
    raise SinkError("no server answers")


def die(_: Callable[[], None]) -> None:
    raise Death


def die_unheard(work: Callable[[], None]) -> None:
    work()
    raise Death


@mirror_and_log_of_each_sink
def test_K06_a_table_that_is_refused_fails_alone_and_the_other_gets_to_the_epoch_s_end(
    two_tables: TwoTables,
) -> None:
    begun, end = two_tables.applier.position, two_tables.work()
    assert begun == Position.ZERO
    with failing(two_tables.sink, refuse):
        two_tables.applier.apply(end)
        later = two_tables.work()
        two_tables.applier.apply(later)
    status = two_tables.applier.tables.statuses[SECOND.name]
    assert (status.state, status.remedy) == (TableState.FAILED, "mend it")
    assert two_tables.applier.tables.statuses[FIRST.name].state is TableState.STREAMING
    assert two_tables.log.last().position == later  # type: ignore[union-attr]
    two_tables.assert_exact(later, Position.of(two_tables.second.source.fence))


@mirror_and_log_of_each_sink
@pytest.mark.parametrize("fault", [die, die_unheard], ids=lambda fault: fault.__name__)
def test_K06_an_epoch_that_ends_in_the_middle_is_not_recorded_and_is_completed_by_the_next_run(
    two_tables: TwoTables, fault: Fault
) -> None:
    end = two_tables.work()
    with failing(two_tables.sink, fault), pytest.raises(Death):
        two_tables.applier.apply(end)
    assert two_tables.log.last() is None
    fence = Position.of(two_tables.second.source.fence)
    two_tables.assert_exact(end, end if fault is die_unheard else fence)
    two_tables.start().apply(end)
    later = two_tables.work()
    two_tables.applier.apply(later)
    assert two_tables.log.last().position == later  # type: ignore[union-attr]
    two_tables.assert_exact(later, later)


@mirror_and_log_of_each_sink
def test_K06_a_table_that_was_paused_for_an_epoch_applies_missed_changes_with_the_next(
    two_tables: TwoTables,
) -> None:
    end, fence = two_tables.work(), Position.of(two_tables.second.source.fence)
    with failing(two_tables.sink, be_away):
        two_tables.applier.apply(end)
    two_tables.assert_exact(end, fence)
    assert two_tables.applier.tables.statuses[SECOND.name].state is TableState.RETRYING
    later = two_tables.work()
    two_tables.applier.apply(later)
    two_tables.assert_exact(later, later)


@mirror_and_log_of_each_sink
def test_K06_an_answer_that_is_lost_once_is_made_good_in_the_same_epoch(two_tables: TwoTables) -> None:
    attempts: list[int] = []

    def lose_the_first(work: Callable[[], None]) -> None:
        work()
        attempts.append(1)
        if len(attempts) == 1:
            raise SinkError("the answer was lost")

    end = two_tables.work()
    with failing(two_tables.sink, lose_the_first):
        two_tables.applier.apply(end)
    assert len(attempts) == 2
    two_tables.assert_exact(end, end)


@mirror_and_log_of_each_sink
def test_a_checkpoint_or_a_record_of_epochs_that_is_out_of_date_changes_nothing(
    two_tables: TwoTables, tmp_path: Path
) -> None:
    ends = [two_tables.work() for _ in range(3)]
    two_tables.applier.apply(ends[0])
    shutil.copytree(two_tables.setup.root / "epochs", tmp_path / "old")
    two_tables.applier.apply(ends[2])
    two_tables.applier.apply(ends[1])
    two_tables.assert_exact(ends[2], ends[2])
    for put_back in (
        lambda: shutil.copytree(tmp_path / "old", two_tables.setup.root / "epochs"),
        lambda: None,
    ):
        shutil.rmtree(two_tables.setup.root / "epochs")
        put_back()
        (two_tables.setup.root / "epochs").mkdir(exist_ok=True)
        for end in (ends[0], ends[1], ends[2]):
            two_tables.start().apply(end)
        assert two_tables.log.last().position == ends[2]  # type: ignore[union-attr]
        two_tables.assert_exact(ends[2], ends[2])
