"""Conformance suite for `RecordSource`.

Write a `RecordHarness` for the source. In a pytest module, subclass `RecordSourceConformance` and return a
new harness for each test from the fixture `harness`; `capture_conformance` shows such a module. For pytest to
explain failed assertions, a conftest calls `pytest.register_assert_rewrite` with the names of this module and
of `penstock.testing.records_conformance`. `examples/list_records.py` is an implementation that passes the
suite.
"""

from __future__ import annotations

from datetime import datetime
from functools import partial

from penstock.contracts.capture import Delete, Truncate
from penstock.contracts.records import Operation, RecordPosition
from penstock.errors import (
    InvalidUrlError,
    NoRowsError,
    NoTableError,
    RecordGoneError,
    RecordNotFoundError,
    Recovery,
    SnapshotInterruptedError,
)
from penstock.testing.records_conformance import (
    MARK,
    RecordHarness,
    ack_all,
    apply,
    check_as_before,
    fail_in_a_snapshot,
    note,
    opened,
    raises,
    read,
    read_on,
    seen,
    start,
    upsert,
)
from penstock.testing.rules import rule
from penstock.testing.streams import Background

__all__ = ["RecordHarness", "RecordSourceConformance"]


class RecordSourceConformance:
    """One test per rule of the contract; the test's name states the rule."""

    # --- reading --------------------------------------------------------------------------------------------

    @rule("record_source", "RecordSource.open()", "RecordSource.read()", "open", "increments", "read-next")
    def test_records_are_the_existing_rows_and_then_the_changes(self, harness: RecordHarness) -> None:
        harness.insert(1, 2, 3)
        with opened(harness) as source:
            rows = read_on(harness, source, None, 3)
            assert {record.operation for record in rows} == {Operation.SNAPSHOT}
            assert {record.key["id"]: note(record) for record in rows} == {
                1: "note 1",
                2: "note 2",
                3: "note 3",
            }
            events = [
                upsert(harness, 4, "four"),
                upsert(harness, 1, None),
                Delete(harness.table, {"id": 2}),
                Truncate(harness.table),
            ]
            for event in events:
                harness.commit(event)
            changes = read_on(harness, source, rows[-1].position, 4)
        assert [seen(record) for record in changes] == [
            (Operation.UPSERT, 4, "four"),
            (Operation.UPSERT, 1, None),
            (Operation.DELETE, 2, None),
            (Operation.TRUNCATE, None, None),
        ]

    @rule("record_source", "builds")
    def test_record_has_key_payload_metadata_timestamp_and_a_unique_position(
        self, harness: RecordHarness
    ) -> None:
        harness.insert(1)
        with opened(harness) as source:
            first = read(harness, source, None)
            harness.commit(upsert(harness, 1, "changed"), Delete(harness.table, {"id": 1}))
            changed, deleted = read_on(harness, source, first.position, 2)
        assert [dict(record.key) for record in (first, changed, deleted)] == [{"id": 1}] * 3
        payloads = [
            None if record.payload is None else dict(record.payload) for record in (first, changed, deleted)
        ]
        assert payloads == [{"id": 1, "note": "note 1"}, {"id": 1, "note": "changed"}, None]
        for record in (first, changed, deleted):
            assert record.table == harness.table
            assert isinstance(record.timestamp, datetime)
            assert record.timestamp.tzinfo is not None, "timestamps must have a time zone"
        assert len({record.position for record in (first, changed, deleted)}) == 3

    def test_empty_and_negative_keys_and_values_are_delivered(self, harness: RecordHarness) -> None:
        pairs: list[tuple[int, str | None]] = [(0, ""), (-1, None), (1, "NULL"), (-(2**31), "\N{SNOWMAN}\n")]
        with opened(harness) as source:
            position = start(harness, source)
            harness.commit(*(upsert(harness, key, text) for key, text in pairs))
            changes = read_on(harness, source, position, len(pairs))
        assert [(record.key["id"], note(record)) for record in changes] == pairs

    def test_snapshot_rows_and_changes_leave_no_gap(self, harness: RecordHarness) -> None:
        harness.insert(1, 2)
        with opened(harness) as source:
            harness.insert(3)
            harness.commit(Delete(harness.table, {"id": 1}))
            first = read(harness, source, None)
            harness.insert(4)
            assert apply(harness, source, [first]) == {2: "note 2", 3: "note 3", 4: "note 4", MARK: "mark"}

    # --- positions ------------------------------------------------------------------------------------------

    @rule("record_source", "RecordSource.read()", "read-next")
    def test_same_position_gives_the_same_record(self, harness: RecordHarness) -> None:
        harness.insert(1, 2)
        with opened(harness) as source:
            rows = [read(harness, source, None), read(harness, source, None)]
            assert rows[0] == rows[1]
            last = read(harness, source, rows[0].position)
            assert last == read(harness, source, rows[0].position)
            harness.insert(3, 4)
            third = read(harness, source, last.position)
            assert third == read(harness, source, last.position)
            assert read(harness, source, third.position).key["id"] == 4

    @rule("record_source", "increments", "read-next")
    def test_earlier_position_goes_back(self, harness: RecordHarness) -> None:
        with opened(harness) as source:
            position = start(harness, source)
            harness.insert(1, 2)
            harness.insert(3)
            changes = read_on(harness, source, position, 3)
            for at in (0, 1):
                assert [each.position for each in read_on(harness, source, changes[at].position, 2 - at)] == [
                    each.position for each in changes[at + 1 :]
                ]
            assert read_on(harness, source, position, 3) == changes

    @rule("record_source", "read-next")
    def test_reading_resumes_from_a_position_stored_as_text(self, harness: RecordHarness) -> None:
        with opened(harness) as source:
            position = start(harness, source)
            harness.insert(1, 2)
            harness.insert(3)
            changes = read_on(harness, source, position, 3)
        for at in (0, 1):
            with opened(harness) as source:
                stored = RecordPosition(str(changes[at].position))
                assert read_on(harness, source, stored, 2 - at) == changes[at + 1 :]

    @rule("record_source", "not-found")
    def test_missing_next_record_is_a_retryable_error(self, harness: RecordHarness) -> None:
        with opened(harness) as source:
            position = start(harness, source)
            error = raises(RecordNotFoundError, lambda: source.read(position))
            assert error.recovery is Recovery.RETRY
            harness.insert(1)
            assert read(harness, source, position).key["id"] == 1

    @rule("record_source", "not-found")
    def test_position_of_another_source_is_refused(self, harness: RecordHarness) -> None:
        with opened(harness) as source:
            position = start(harness, source)
            for text in ("", "no position at all", f"{position} and more"):
                error = raises(RecordGoneError, partial(source.read, RecordPosition(text)))
                assert error.recovery is not Recovery.RETRY, "a retry cannot succeed"
                raises(RecordGoneError, partial(source.ack, RecordPosition(text)))

    # --- acknowledging --------------------------------------------------------------------------------------

    def test_reading_and_teardown_acknowledge_nothing(self, harness: RecordHarness) -> None:
        with opened(harness) as source:
            position = start(harness, source)
            harness.insert(1)
            harness.insert(2)
            changes = read_on(harness, source, position, 2)
        with opened(harness) as source:
            assert read_on(harness, source, position, 2) == changes

    @rule("record_source", "RecordSource.ack()", "not-found")
    def test_acknowledged_positions_are_gone_and_never_skipped(self, harness: RecordHarness) -> None:
        with opened(harness) as source:
            position = start(harness, source)
            for key in (1, 2, 3):
                harness.insert(key)
            first, second, third = read_on(harness, source, position, 3)
            source.ack(second.position)
            raises(RecordGoneError, lambda: source.read(first.position))
        with opened(harness) as source:
            for gone in (position, first.position):
                error = raises(RecordGoneError, partial(source.read, gone))
                assert error.recovery is not Recovery.RETRY, "a retry cannot succeed"
            assert read(harness, source, second.position) == third

    @rule("record_source", "RecordSource.ack()")
    def test_acknowledging_twice_or_an_earlier_position_has_no_effect(self, harness: RecordHarness) -> None:
        with opened(harness) as source:
            position = start(harness, source)
            for key in (1, 2, 3):
                harness.insert(key)
            first, second, third = read_on(harness, source, position, 3)
            for each in (second, second, first):
                source.ack(each.position)
        with opened(harness) as source:
            raises(RecordGoneError, lambda: source.read(first.position))
            source.ack(first.position)
            source.ack(second.position)
            assert read(harness, source, second.position) == third
            source.ack(third.position)
        with opened(harness) as source:
            raises(RecordGoneError, lambda: source.read(second.position))

    def test_acknowledgement_can_come_in_a_later_run(self, harness: RecordHarness) -> None:
        with opened(harness) as source:
            position = start(harness, source)
            for key in (1, 2):
                harness.insert(key)
            first, second = read_on(harness, source, position, 2)
        with opened(harness) as source:
            source.ack(first.position)
            assert read(harness, source, first.position) == second
        with opened(harness) as source:
            raises(RecordGoneError, lambda: source.read(position))

    def test_acknowledging_snapshot_rows_does_not_move_the_resume_point(self, harness: RecordHarness) -> None:
        harness.insert(1, 2, 3)
        with opened(harness) as source:
            for record in read_on(harness, source, None, 2):
                source.ack(record.position)
        with opened(harness) as source:
            rows = read_on(harness, source, None, 3)
            harness.insert(4)
            last = read(harness, source, rows[-1].position)
            source.ack(rows[-1].position)
            assert (sorted(str(row.key["id"]) for row in rows), last.key["id"]) == (["1", "2", "3"], 4)
        with opened(harness) as source:
            assert read(harness, source, rows[-1].position) == last

    # --- snapshots ------------------------------------------------------------------------------------------

    @rule("record_source", "RecordSource.teardown()", "interrupt")
    def test_teardown_during_a_snapshot_raises_after_closing_everything(self, harness: RecordHarness) -> None:
        harness.insert(1, 2, 3)
        before = harness.open_resources()
        source = harness.source()
        source.open(harness.config())
        read(harness, source, None)
        raises(SnapshotInterruptedError, source.teardown)
        check_as_before(harness, before)
        source.teardown()

    @rule("record_source", "interrupt")
    def test_interrupted_snapshot_cannot_be_resumed(self, harness: RecordHarness) -> None:
        harness.insert(1, 2, 3)
        with opened(harness) as source:
            first = read(harness, source, None)
        harness.commit(Delete(harness.table, {"id": 1}))
        with opened(harness) as source:
            for _ in range(2):
                error = raises(SnapshotInterruptedError, lambda: source.read(first.position))
                assert error.recovery is not Recovery.RETRY, "a retry cannot succeed"
                assert error.hint, "the error must name what can succeed: to read from the start"
            assert {row.key["id"] for row in read_on(harness, source, None, 2)} == {2, 3}

    def test_reading_from_the_start_again_takes_a_new_snapshot(self, harness: RecordHarness) -> None:
        harness.insert(1)
        with opened(harness) as source:
            source.ack(read(harness, source, None).position)
            harness.commit(Delete(harness.table, {"id": 1}))
            harness.insert(2, 3)
            rows = read_on(harness, source, None, 2)
            assert {seen(row) for row in rows} == {
                (Operation.SNAPSHOT, 2, "note 2"),
                (Operation.SNAPSHOT, 3, "note 3"),
            }
            harness.commit(Delete(harness.table, {"id": 2}))
            harness.insert(4)
            again = read_on(harness, source, None, 2)
            assert {row.key["id"] for row in again} == {3, 4}

    def test_finished_snapshot_is_not_read_again(self, harness: RecordHarness) -> None:
        harness.insert(1, 2)
        with opened(harness) as source:
            rows = read_on(harness, source, None, 2)
        harness.insert(3)
        with opened(harness) as source:
            assert seen(read(harness, source, rows[-1].position)) == (Operation.UPSERT, 3, "note 3")

    # --- validation -----------------------------------------------------------------------------------------

    @rule("record_source", "RecordSource.validate()")
    def test_validating_opens_nothing(self, harness: RecordHarness) -> None:
        before = harness.open_resources()
        source = harness.source()
        source.validate(harness.config())
        source.validate(harness.config_of_nobody())
        assert harness.open_resources() == before
        raises(NoRowsError, lambda: source.read(None))

    @rule("record_source", "RecordSource.validate()", "no-table")
    def test_no_table_is_refused(self, harness: RecordHarness) -> None:
        raises(NoTableError, lambda: harness.source().validate(harness.config_without_table()))
        raises(NoTableError, lambda: harness.source().open(harness.config_without_table()))

    @rule("record_source", "RecordSource.validate()", "invalid-url")
    def test_malformed_address_is_refused(self, harness: RecordHarness) -> None:
        raises(InvalidUrlError, lambda: harness.source().validate(harness.config_without_address()))
        raises(InvalidUrlError, lambda: harness.source().open(harness.config_without_address()))

    @rule("record_source", "RecordSource.open()", "open", "invalid-url")
    def test_unreachable_address_is_refused_by_open(self, harness: RecordHarness) -> None:
        before = harness.open_resources()
        raises(InvalidUrlError, lambda: harness.source().open(harness.config_of_nobody()))
        check_as_before(harness, before)

    # --- lifetime -------------------------------------------------------------------------------------------

    @rule("record_source", "no-rows")
    def test_source_that_is_not_open_has_no_rows(self, harness: RecordHarness) -> None:
        source = harness.source()
        raises(NoRowsError, lambda: source.read(None))
        source.open(harness.config())
        position = start(harness, source)
        source.teardown()
        for each in (None, position):
            raises(NoRowsError, partial(source.read, each))

    @rule("record_source", "RecordSource.ack()")
    def test_acknowledging_where_nothing_is_open_is_refused(self, harness: RecordHarness) -> None:
        with opened(harness) as source:
            position = start(harness, source)
            harness.insert(1)
            change = read(harness, source, position)
        raises(NoRowsError, lambda: source.ack(change.position))
        raises(NoRowsError, lambda: harness.source().ack(change.position))
        with opened(harness) as source:
            assert read(harness, source, position) == change, "an ack after teardown must have no effect"

    @rule("record_source", "RecordSource.teardown()", "holds")
    def test_teardown_releases_everything(self, harness: RecordHarness) -> None:
        before = harness.open_resources()
        for reads in (False, True):
            source = harness.source()
            source.open(harness.config())
            if reads:
                start(harness, source)
            source.teardown()
            source.teardown()
            check_as_before(harness, before)
        harness.source().teardown()

    @rule("record_source", "mutex", "no-rows")
    def test_teardown_ends_a_read_that_waits(self, harness: RecordHarness) -> None:
        with opened(harness) as source:
            position = start(harness, source)
            reading = Background(lambda: read(harness, source, position))
            source.teardown()
            raises(NoRowsError, lambda: reading.result(harness.deadline_seconds, "the end of a read"))

    @rule("record_source", "mutex")
    def test_any_thread_may_read_and_acknowledge(self, harness: RecordHarness) -> None:
        with opened(harness) as source:
            position = start(harness, source)
            for key in range(20):
                harness.insert(key)
            changes = read_on(harness, source, position, 20)
            threads = [Background(partial(read, harness, source, changes[4].position)) for _ in range(4)]
            for thread in threads:
                assert thread.result(harness.deadline_seconds, "a record") == changes[5]
            parts = [Background(partial(ack_all, source, changes[at % 4 :: 4])) for at in range(8)]
            for part in parts:
                part.result(harness.deadline_seconds, "acknowledging")
        with opened(harness) as source:
            raises(RecordGoneError, lambda: source.read(changes[-2].position))
            error = raises(RecordNotFoundError, lambda: source.read(changes[-1].position))
            assert error.recovery is Recovery.RETRY, "exactly the delivered records were acknowledged"

    @rule("record_source", "with-pattern")
    def test_source_is_a_context(self, harness: RecordHarness) -> None:
        with harness.source() as source:
            source.open(harness.config())
            start(harness, source)
        raises(NoRowsError, lambda: source.read(None))
        harness.insert(1, 2)
        raises(KeyError, lambda: fail_in_a_snapshot(harness))
