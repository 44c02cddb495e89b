"""The record source conformance suite fails for implementations that break a rule."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

import pytest
from typing_extensions import override

from examples.list_records import ListRecordSource, Log
from penstock.contracts.records import Record, RecordPosition, RecordSource
from penstock.errors import (
    NoRowsError,
    NoTableError,
    PenstockError,
    RecordGoneError,
    RecordNotFoundError,
    Recovery,
    SnapshotInterruptedError,
)
from penstock.testing.record_source_conformance import RecordSourceConformance
from penstock.testing.rules import suite_tests
from tests.support.contract.breaking import caught, caught_by
from tests.support.contract.list_harnesses import ListRecordHarness

SOURCES = RecordSourceConformance


# --- what is read -------------------------------------------------------------------------------------------


@caught_by(SOURCES.test_records_are_the_existing_rows_and_then_the_changes)
class ChangesAlone(ListRecordSource):
    @override
    def read(self, position: RecordPosition | None) -> Record:
        return super().read(position or RecordPosition("after 0"))


@caught_by(SOURCES.test_record_has_key_payload_metadata_timestamp_and_a_unique_position)
class TimesOfNowhere(ListRecordSource):
    @override
    def read(self, position: RecordPosition | None) -> Record:
        record = super().read(position)
        return replace(record, timestamp=record.timestamp.replace(tzinfo=None))


@caught_by(SOURCES.test_empty_and_negative_keys_and_values_are_delivered)
class SkipsKeysBelowOne(ListRecordSource):
    @override
    def read(self, position: RecordPosition | None) -> Record:
        record = super().read(position)
        return record if int(str(record.key.get("id", 1))) > 0 else self.read(record.position)


@caught_by(SOURCES.test_snapshot_rows_and_changes_leave_no_gap)
class ChangesBeginWithTheLastRow(ListRecordSource):
    @override
    def read(self, position: RecordPosition | None) -> Record:
        record = super().read(position)
        if record.operation == "snapshot" and record.position.text.startswith("after"):
            return replace(record, position=RecordPosition(f"after {len(self._opened().events)}"))
        return record


# --- positions ----------------------------------------------------------------------------------------------


@caught_by(SOURCES.test_same_position_gives_the_same_record, SOURCES.test_earlier_position_goes_back)
class KeepsItsOwnPlace(ListRecordSource):
    own: RecordPosition | None = None

    @override
    def read(self, position: RecordPosition | None) -> Record:
        record = super().read(self.own)
        self.own = record.position
        return record


class Remembers(ListRecordSource):
    """Keeps every record of this run."""

    def __init__(self, logs: Mapping[str, Log]) -> None:
        super().__init__(logs)
        self.given: set[RecordPosition | None] = {None}

    @override
    def read(self, position: RecordPosition | None) -> Record:
        record = super().read(position)
        self.given.add(record.position)
        return record


@caught_by(SOURCES.test_reading_resumes_from_a_position_stored_as_text)
class PlacesEndWithTheRun(Remembers):
    @override
    def read(self, position: RecordPosition | None) -> Record:
        if position not in self.given:
            raise RecordGoneError("never seen")
        return super().read(position)


@caught_by(SOURCES.test_missing_next_record_is_a_retryable_error)
class GivesUp(ListRecordSource):
    @override
    def read(self, position: RecordPosition | None) -> Record:
        try:
            return super().read(position)
        except RecordNotFoundError as error:
            raise RecordGoneError(error.message) from error


@caught_by(SOURCES.test_position_of_another_source_is_refused)
class TakesAnyPosition(ListRecordSource):
    @override
    def read(self, position: RecordPosition | None) -> Record:
        try:
            return super().read(position)
        except RecordGoneError:
            return super().read(None)


# --- acknowledging ------------------------------------------------------------------------------------------


@caught_by(SOURCES.test_reading_and_teardown_acknowledge_nothing)
class ReadingIsAcknowledging(ListRecordSource):
    @override
    def read(self, position: RecordPosition | None) -> Record:
        record = super().read(position)
        self.ack(record.position)
        return record


@caught_by(SOURCES.test_acknowledged_positions_are_gone_and_never_skipped)
class PassesOver(ListRecordSource):
    @override
    def read(self, position: RecordPosition | None) -> Record:
        try:
            return super().read(position)
        except RecordGoneError:
            return super().read(RecordPosition(f"after {self._opened().acked}"))


@caught_by(SOURCES.test_acknowledging_twice_or_an_earlier_position_has_no_effect)
class TheLastAckCounts(ListRecordSource):
    @override
    def ack(self, position: RecordPosition) -> None:
        self._opened().acked = 0
        super().ack(position)


@caught_by(SOURCES.test_acknowledgement_can_come_in_a_later_run)
class AcksEndWithTheRun(Remembers):
    @override
    def ack(self, position: RecordPosition) -> None:
        if position in self.given:
            super().ack(position)


@caught_by(SOURCES.test_acknowledging_snapshot_rows_does_not_move_the_resume_point)
class RowsMoveThePoint(ListRecordSource):
    @override
    def ack(self, position: RecordPosition) -> None:
        super().ack(position)
        if position.text.startswith("row"):
            self._opened().acked = len(self._opened().events) + 1


# --- snapshots ----------------------------------------------------------------------------------------------


@caught_by(SOURCES.test_teardown_during_a_snapshot_raises_after_closing_everything)
class TearsDownInSilence(ListRecordSource):
    @override
    def teardown(self) -> None:
        with suppress(SnapshotInterruptedError):
            super().teardown()


@caught_by(SOURCES.test_interrupted_snapshot_cannot_be_resumed)
class BeginsAnewInSilence(ListRecordSource):
    @override
    def read(self, position: RecordPosition | None) -> Record:
        try:
            return super().read(position)
        except SnapshotInterruptedError:
            return super().read(None)


@caught_by(SOURCES.test_interrupted_snapshot_cannot_be_resumed)
class AsksForARetry(ListRecordSource):
    @override
    def read(self, position: RecordPosition | None) -> Record:
        try:
            return super().read(position)
        except SnapshotInterruptedError as error:
            # Not in a subclass, which would belong to the tree of errors in this process.
            vars(error)["recovery"] = Recovery.RETRY
            raise


@caught_by(SOURCES.test_reading_from_the_start_again_takes_a_new_snapshot)
class TheFirstRowStaysTheFirst(ListRecordSource):
    first: Record | None = None

    @override
    def read(self, position: RecordPosition | None) -> Record:
        if position is None and self.first is not None:
            return self.first
        record = super().read(position)
        self.first = record if position is None else self.first
        return record


@caught_by(SOURCES.test_finished_snapshot_is_not_read_again)
class SnapshotAtEveryStart(Remembers):
    @override
    def read(self, position: RecordPosition | None) -> Record:
        return super().read(position if len(self.given) > 1 else None)


# --- settings and lifetime ---


@caught_by(SOURCES.test_validating_opens_nothing)
class ValidatingOpens(ListRecordSource):
    @override
    def validate(self, config: Mapping[str, str]) -> None:
        super().validate(config)
        self._log = Log()


@caught_by(SOURCES.test_no_table_is_refused)
class AnyTable(ListRecordSource):
    @override
    def validate(self, config: Mapping[str, str]) -> None:
        with suppress(NoTableError):
            super().validate(config)


@caught_by(SOURCES.test_malformed_address_is_refused)
class AnyAddress(ListRecordSource):
    @override
    def validate(self, config: Mapping[str, str]) -> None:
        if not config.get("table"):
            raise NoTableError("no table")


@caught_by(SOURCES.test_unreachable_address_is_refused_by_open)
class ConnectsLater(ListRecordSource):
    @override
    def open(self, config: Mapping[str, str]) -> None:
        super().open({**config, "url": "list:here"})


@caught_by(SOURCES.test_source_that_is_not_open_has_no_rows)
class NeverCloses(ListRecordSource):
    @override
    def teardown(self) -> None:
        return


@caught_by(SOURCES.test_acknowledging_where_nothing_is_open_is_refused)
class LateAcksAreNothing(ListRecordSource):
    @override
    def ack(self, position: RecordPosition) -> None:
        with suppress(NoRowsError):
            super().ack(position)


@caught_by(SOURCES.test_teardown_releases_everything)
class NeverLetsGo(ListRecordSource):
    @override
    def open(self, config: Mapping[str, str]) -> None:
        super().open(config)
        vars(self._opened()).setdefault("turnstile", []).append("taken")


@caught_by(SOURCES.test_teardown_ends_a_read_that_waits)
class WaitsForEver(ListRecordSource):
    @override
    def read(self, position: RecordPosition | None) -> Record:
        try:
            return super().read(position)
        except NoRowsError as error:
            raise RecordNotFoundError(error.message) from error


@caught_by(SOURCES.test_any_thread_may_read_and_acknowledge)
class OfOneThread(ListRecordSource):
    @override
    def open(self, config: Mapping[str, str]) -> None:
        super().open(config)
        self.owner = threading.current_thread()

    @override
    def ack(self, position: RecordPosition) -> None:
        if self.owner is threading.current_thread():
            super().ack(position)


@caught_by(SOURCES.test_source_is_a_context)
class LeavesTheSourceOpen(ListRecordSource):
    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


# --- and they are caught ------------------------------------------------------------------------------------


class BrokenRecordHarness(ListRecordHarness):
    deadline_seconds = 0.3

    def __init__(self, broken: type[ListRecordSource]) -> None:
        super().__init__()
        self._broken = broken

    @override
    def source(self) -> RecordSource:
        return self._broken({"here": self.log})

    @override
    def open_resources(self) -> object:
        return list(vars(self.log).get("turnstile", []))


@pytest.mark.parametrize("test", list(suite_tests(SOURCES)), ids=lambda each: each.__name__)
def test_broken_source_fails_the_suite(test: Callable[..., object]) -> None:
    assert caught.get(test), "no implementation is known that breaks this rule: is it one?"
    for broken in caught[test]:
        with pytest.raises((AssertionError, PenstockError)):
            test(SOURCES(), BrokenRecordHarness(broken))
