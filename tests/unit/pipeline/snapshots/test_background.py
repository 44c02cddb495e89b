"""Background snapshots: when one of them is finished."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typing_extensions import override

from penstock.errors import SinkRefusedError
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.snapshots.background import BackgroundSnapshots, SnapshotListener
from penstock.pipeline.snapshots.coordinator import SnapshotCoordinator, SnapshotRound
from penstock.pipeline.snapshots.schedule import Schedule
from penstock.postgres.catalog import CatalogTable
from penstock.schema import TableName
from tests.support.waiting import wait_for

TABLE = CatalogTable(1, TableName("public", "t"))


class _Coordinator:
    """Copies nothing: waits until it may, and then fails or says that there was no table."""

    def __init__(self, failure: Exception | None) -> None:
        self.executors = self
        self.sink = self
        self.store = self
        self.asked: list[str] = []
        self.may_end = threading.Event()
        self._failure = failure

    def enter(self) -> None: ...

    def release_ownership(self, _: TableName) -> None:
        self.asked.append("release_ownership")

    def forget(self, _: TableName) -> None:
        self.asked.append("forget")

    def load_target(self, _: TableName) -> object:
        return object()

    def copy(
        self,
        tables: Sequence[CatalogTable],
        _hold: object,
        arrive: Callable[[TableName], None],
        _stopping: object,
    ) -> dict[Any, Any]:
        assert self.may_end.wait(10)
        if self._failure is not None:
            raise self._failure
        for table in tables:
            arrive(table.name)
        return {}


class _Unfinished(_Coordinator):
    """Copies until the run ends."""

    def cancel(self) -> None:
        self.may_end.set()

    @override
    def copy(
        self,
        tables: Sequence[CatalogTable],
        _hold: object,
        arrive: Callable[[TableName], None],
        _stopping: object,
    ) -> dict[Any, Any]:
        assert self.may_end.wait(10)
        return {}


class _Listener:
    def set_fence(self, *_: object) -> None: ...

    def __init__(self) -> None:
        self.entered = 0

    def add_copied(self, _: object) -> None:
        self.entered += 1


def test_a_copy_of_a_removed_table_is_neither_handed_over_nor_resumed() -> None:
    coordinator, listener = _Coordinator(None), _Listener()
    copies = BackgroundSnapshots(
        cast("SnapshotCoordinator", coordinator), cast("SnapshotListener", listener), PipelineObserver()
    )
    copies.start([TABLE])
    copies.abandon(TABLE.name)
    assert copies.is_copying(TABLE.name), "it cannot be copied again before this copy has ended"
    assert coordinator.asked == []
    coordinator.may_end.set()
    wait_for(lambda: copies.is_over, "the copy to be over")
    assert not copies.is_copying(TABLE.name)
    assert coordinator.asked == ["release_ownership", "forget"]
    assert listener.entered == 0
    copies.start([TABLE])
    wait_for(lambda: copies.is_over, "the next copy to be over")
    assert listener.entered == 1, "once it was added again"


def test_a_table_that_is_removed_while_its_copy_fails_can_be_copied_again() -> None:
    coordinator, removing = _Coordinator(None), threading.Event()
    copies: BackgroundSnapshots

    class Failing(_Listener):
        def fail(self, *_: object) -> None:
            """The table is removed while the failure is reported, as by the thread of an epoch."""
            thread = threading.Thread(target=remove)
            thread.start()
            assert removing.wait(10)
            thread.join(0.5)

    def remove() -> None:
        removing.set()
        copies.abandon(TABLE.name)

    def refuse(*_: object) -> dict[TableName, SinkRefusedError]:
        return {TABLE.name: SinkRefusedError("no", hint="no")}

    copy, listener = coordinator.copy, Failing()
    coordinator.copy = refuse  # type: ignore[method-assign,assignment]
    copies = BackgroundSnapshots(
        cast("SnapshotCoordinator", coordinator), cast("SnapshotListener", listener), PipelineObserver()
    )
    copies.start([TABLE])
    wait_for(lambda: copies.is_over and "forget" in coordinator.asked, "the copy to have failed")
    coordinator.copy = copy  # type: ignore[method-assign]
    coordinator.may_end.set()
    copies.start([TABLE])
    wait_for(lambda: copies.is_over, "the next copy to be over")
    assert listener.entered == 1


@pytest.mark.parametrize("is_removed", [False, True])
def test_an_unfinished_copy_is_resumed_by_the_next_run_unless_its_table_was_removed(
    *, is_removed: bool
) -> None:
    coordinator = _Unfinished(None)
    copies = BackgroundSnapshots(
        cast("SnapshotCoordinator", coordinator), cast("SnapshotListener", _Listener()), PipelineObserver()
    )
    copies.start([TABLE])
    if is_removed:
        copies.abandon(TABLE.name)
    copies.stop()
    assert coordinator.asked == (["forget"] if is_removed else [])


@pytest.mark.parametrize("failure", [None, SinkRefusedError("no", hint="no")])
def test_a_copy_is_over_when_its_thread_has_ended_and_has_nothing_to_raise(failure: Exception | None) -> None:
    coordinator = _Coordinator(failure)
    copies = BackgroundSnapshots(
        cast("SnapshotCoordinator", coordinator), cast("SnapshotListener", _Listener()), PipelineObserver()
    )
    copies.start([TABLE])
    assert not copies.is_over
    coordinator.may_end.set()
    if failure is None:
        wait_for(lambda: copies.is_over, "the copy to be over")
        copies.check()
    else:
        wait_for(lambda: not any(thread.is_alive() for thread in copies._threads), "its thread to end")
        assert not copies.is_over
        with pytest.raises(SinkRefusedError):
            copies.check()


def test_an_error_while_an_error_is_answered_ends_the_round_and_not_only_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing: Any = None
    copying = SnapshotRound(nothing, [], 1, nothing)
    schedule: Any = Schedule([(SimpleNamespace(name=TABLE.name), 0)])

    def fail(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(copying, "_run_step", fail)
    monkeypatch.setattr(copying, "_handle_error", fail)
    copying._lane(schedule, nothing)
    assert isinstance(copying._fatal, RuntimeError), "`run` raises it"
    assert schedule.take() is None, "no other thread waits for this work item"
