"""Harness for `SourceConnector` tests, and the tests of lifecycle, batches and checkpoints. Every wait has a
deadline.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa

from penstock.contracts.connector import ConnectorConfig, SourceBatch, SourceCheckpoint, SourceConnector
from penstock.errors import ConnectorError
from penstock.testing.rules import rule
from penstock.testing.streams import Background, wait_for

Row = tuple[int, str | None]
"""`id` and `note`."""

MAX_RECORDS = 1000


class ConnectorHarness(ABC):
    """The source behind a connector: rows can be added, with the columns `id` (number) and `note` (text,
    nullable).

    Rows that exist when a connector is opened for the first time are delivered before rows added later.
    """

    deadline_seconds = 30.0
    replays = True
    signals = True
    """Whether `data_ready` returns an event that is set when rows are available."""
    reshapes = True
    """Whether the schema of the rows can change. If so, a schema change must request a checkpoint."""
    acknowledges = True
    """Whether the connector acknowledges committed epochs to the source."""
    discovers = True
    """Whether `discover_schema` works before `open`."""
    provides_schemas = True
    registers_schemas = False
    """Whether `config` names a schema registry."""

    @abstractmethod
    def connector(self) -> SourceConnector:
        """Return a new connector, as after a process start."""

    @abstractmethod
    def config(self) -> ConnectorConfig:
        """The configuration to open the connector with."""

    @abstractmethod
    def unreachable(self) -> ConnectorConfig:
        """A configuration for a source that never answers."""

    @abstractmethod
    def add(self, *rows: Row) -> None:
        """Commit rows to the source."""

    def change_shape(self) -> None:  # noqa: B027 - for sources that can
        """Change the schema of the rows added from now on, for example by a column."""

    def acknowledged(self) -> object:
        """The source's acknowledged position, as a comparable value.

        It changes only with an acknowledgement.
        """
        return None

    def apply(self, target: list[Row], records: pa.RecordBatch) -> None:
        """Append the rows of a batch to a target. If the source can restart its snapshot, override this
        method and clear the target for a batch that restarts it.
        """
        target += zip(*(records.column(name).to_pylist() for name in ("id", "note")), strict=True)

    def offset_of(self, checkpoint: SourceCheckpoint, partition: str) -> str:
        """The offset of a partition in a checkpoint."""
        return checkpoint.offsets[partition]

    def open_resources(self) -> object:
        """The open resources, such as the number of connections and threads, as a comparable value. It must
        be equal before `open` and after `close`.
        """
        return None


class Bare(SourceConnector):
    """A connector with only the six required methods, without rows."""

    def open(self, config: ConnectorConfig) -> None:
        """Open nothing."""

    def poll_batch(self, max_records: int) -> SourceBatch | None:
        return None

    def schema(self) -> pa.Schema:
        return pa.schema([])

    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint()

    def restore(self, checkpoint: SourceCheckpoint) -> None:
        """Ignore the checkpoint."""

    def close(self) -> None:
        """Close nothing."""


@contextmanager
def opened(harness: ConnectorHarness, stored: SourceCheckpoint | None = None) -> Iterator[SourceConnector]:
    with harness.connector() as connector:
        connector.open(harness.config())
        if stored is not None:
            connector.restore(stored)
        yield connector


def next_batch(
    harness: ConnectorHarness, connector: SourceConnector, max_records: int = MAX_RECORDS
) -> SourceBatch:
    """Poll until there is a batch."""
    deadline = time.monotonic() + harness.deadline_seconds
    while True:
        batch = connector.poll_batch(max_records)
        if batch is not None:
            assert batch.records.num_rows > 0, "a batch must have rows"
            return batch
        assert time.monotonic() < deadline, f"no batch within {harness.deadline_seconds:g} s"
        time.sleep(0.01)


def apply_next(
    harness: ConnectorHarness, connector: SourceConnector, target: list[Row], max_records: int = MAX_RECORDS
) -> None:
    harness.apply(target, next_batch(harness, connector, max_records).records)


def take(harness: ConnectorHarness, connector: SourceConnector, count: int) -> list[Row]:
    """Return at least the next `count` rows."""
    target: list[Row] = []
    while len(target) < count:
        apply_next(harness, connector, target)
    return target


def take_within_limits(
    harness: ConnectorHarness, connector: SourceConnector, target: list[Row], count: int
) -> None:
    """Poll for many rows, then for few, until `target` has `count` rows. Check the size of each batch."""
    deadline = time.monotonic() + harness.deadline_seconds
    while len(target) < count:
        for max_records in (MAX_RECORDS, 1):
            batch = connector.poll_batch(max_records) if len(target) < count else None
            if batch is not None:
                assert 0 < batch.records.num_rows <= max_records
                harness.apply(target, batch.records)
        assert time.monotonic() < deadline, f"{len(target)} of {count} rows in time"
        time.sleep(0.01)


def wait_and_take(harness: ConnectorHarness, connector: SourceConnector, event: threading.Event) -> Row:
    """Poll only when the event is set, as a consumer does that waits for it."""
    target: list[Row] = []
    while not target:
        assert event.wait(harness.deadline_seconds), "a row was added, but the event was not set"
        batch = connector.poll_batch(MAX_RECORDS)
        if batch is not None:
            harness.apply(target, batch.records)
    return target[0]


def until_none(harness: ConnectorHarness, connector: SourceConnector) -> None:
    """Poll until there is no batch, and discard the batches."""
    deadline = time.monotonic() + harness.deadline_seconds
    while connector.poll_batch(MAX_RECORDS) is not None:
        assert time.monotonic() < deadline, "poll_batch never returned None"


def check_nothing_else(harness: ConnectorHarness, connector: SourceConnector) -> None:
    """Check that the next row is a marker that is added now."""
    harness.add((99, "mark"))
    assert take(harness, connector, 1) == [(99, "mark")]


def check_refused(call: Callable[[], object], what: str) -> None:
    try:
        call()
    except ConnectorError:
        return
    raise AssertionError(f"{what} must be refused with a ConnectorError")


def check_plain(checkpoint: SourceCheckpoint) -> None:
    text = checkpoint.to_json()
    assert SourceCheckpoint.from_json(text) == checkpoint
    assert SourceCheckpoint.from_json(text).to_json() == text


def moved(harness: ConnectorHarness, before: object) -> None:
    wait_for(
        lambda: harness.acknowledged() != before,
        f"an acknowledgement after {before}",
        harness.acknowledged,
        harness.deadline_seconds,
    )


DOCUMENT = "source_connector"


class ConnectorReading:
    """Tests of reading. `SourceConnectorConformance` inherits them and adds the others."""

    # --- lifecycle ------------------------------------------------------------------------------------------

    @rule(DOCUMENT, "lifecycle", "open-once", "open()", "close()")
    def test_nothing_can_be_read_before_open_and_after_close(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        connector = harness.connector()
        check_refused(lambda: connector.poll_batch(1), "polling before open")
        connector.open(harness.config())
        check_refused(lambda: connector.open(harness.config()), "opening twice")
        take(harness, connector, 1)
        connector.close()
        check_refused(lambda: connector.poll_batch(1), "polling after close")

    @rule(DOCUMENT, "lifecycle", "close()")
    def test_closing_releases_everything_and_may_be_repeated(self, harness: ConnectorHarness) -> None:
        harness.connector().close()
        before = harness.open_resources()
        harness.add((1, "x"))
        connector = harness.connector()
        connector.open(harness.config())
        take(harness, connector, 1)
        connector.close()
        connector.close()
        wait_for(
            lambda: harness.open_resources() == before,
            f"the resources of before, {before},",
            harness.open_resources,
            harness.deadline_seconds,
        )

    @rule(DOCUMENT, "close()")
    def test_closing_an_unread_connector_releases_everything(self, harness: ConnectorHarness) -> None:
        before = harness.open_resources()
        connector = harness.connector()
        connector.open(harness.config())
        connector.close()
        wait_for(
            lambda: harness.open_resources() == before,
            f"the resources of before, {before},",
            harness.open_resources,
            harness.deadline_seconds,
        )

    # --- polling --------------------------------------------------------------------------------------------

    @rule(DOCUMENT, "external", "lifecycle", "poll_batch()")
    def test_every_row_is_delivered_once_and_in_order(self, harness: ConnectorHarness) -> None:
        rows: list[Row] = [(-1, "negative"), (0, ""), (1, None), (2, "NULL"), (3, "\N{SNOWMAN}\n")]
        harness.add(*rows[:3])
        with opened(harness) as connector:
            target = take(harness, connector, 3)
            harness.add(rows[3])
            harness.add(rows[4])
            assert target + take(harness, connector, 2) == rows
            check_nothing_else(harness, connector)

    @rule(DOCUMENT, "poll-none", "poll_batch()")
    @rule("mistakes", "first-empty-poll")
    def test_none_does_not_end_the_batches(self, harness: ConnectorHarness) -> None:
        with opened(harness) as connector:
            for each in range(3):
                until_none(harness, connector)
                harness.add((each, "x"))
                assert take(harness, connector, 1) == [(each, "x")]

    @rule(DOCUMENT, "poll-none")
    def test_polling_does_not_wait_for_rows(self, harness: ConnectorHarness) -> None:
        with opened(harness) as connector:
            until_none(harness, connector)
            polled = Background(lambda: connector.poll_batch(MAX_RECORDS)).result(
                harness.deadline_seconds, "None from poll_batch without rows"
            )
            assert polled is None

    @rule(DOCUMENT, "max-records")
    def test_limit_of_a_poll_loses_no_row(self, harness: ConnectorHarness) -> None:
        rows: list[Row] = [(each, f"note {each}") for each in range(10)]
        harness.add(*rows[:6])
        with opened(harness) as connector:
            target: list[Row] = []
            for max_records in (1, 3, 2):
                apply_next(harness, connector, target, max_records)
            harness.add(*rows[6:])
            while len(target) < len(rows):
                apply_next(harness, connector, target, 1)
            assert target == rows

    @rule(DOCUMENT, "max-records")
    def test_no_batch_has_more_rows_than_the_poll_asked_for(self, harness: ConnectorHarness) -> None:
        """Also not if the connector has read more rows for an earlier poll, with a higher limit."""
        rows: list[Row] = [(each, f"note {each}") for each in range(8)]
        target: list[Row] = []
        harness.add(*rows[:4])
        with opened(harness) as connector:
            take_within_limits(harness, connector, target, 4)
            if harness.reshapes:
                harness.change_shape()
            harness.add(*rows[4:])
            take_within_limits(harness, connector, target, 8)
            assert target == rows

    # --- checkpoints ----------------------------------------------------------------------------------------

    @rule(DOCUMENT, "checkpoint()")
    def test_a_checkpoint_is_plain_and_survives_as_text(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            check_plain(connector.checkpoint())
            take(harness, connector, 1)
            check_plain(connector.checkpoint())

    @rule(DOCUMENT, "checkpoint()")
    def test_taking_a_checkpoint_has_no_effect(self, harness: ConnectorHarness) -> None:
        rows: list[Row] = [(each, "x") for each in range(4)]
        harness.add(*rows[:2])
        with opened(harness) as connector:
            target = take(harness, connector, 2)
            until_none(harness, connector)
            acknowledged = harness.acknowledged()
            taken = [connector.checkpoint() for _ in range(3)]
            assert taken[0] == taken[1] == taken[2], "checkpoints without reading in between must be equal"
            harness.add(*rows[2:])
            assert target + take(harness, connector, 2) == rows
            assert harness.acknowledged() == acknowledged, (
                "a checkpoint may never be stored, so taking it must not acknowledge"
            )

    @rule(DOCUMENT, "checkpoint-enough", "restore()", "lifecycle")
    def test_every_checkpoint_can_be_resumed_from(self, harness: ConnectorHarness) -> None:
        """The first run reads one batch, the second two, and so on. So a source that must repeat its snapshot
        after each restart advances too.
        """
        rows: list[Row] = [(each, f"note {each}") for each in range(5)]
        harness.add(*rows)
        target: list[Row] = []
        stored: SourceCheckpoint | None = None
        for batches in range(1, 10):
            with opened(harness, stored) as connector:
                for _ in range(batches):
                    if len(target) < len(rows):
                        apply_next(harness, connector, target, 2)
                stored = SourceCheckpoint.from_json(connector.checkpoint().to_json())
            if len(target) >= len(rows):
                break
        assert target == rows, "every row must be delivered exactly once"
        harness.add((99, "mark"))
        with opened(harness, stored) as connector:
            assert take(harness, connector, 1) == [(99, "mark")]

    @rule(DOCUMENT, "checkpoint-enough", "restore()")
    def test_later_rows_can_be_resumed_from_any_checkpoint(self, harness: ConnectorHarness) -> None:
        rows: list[Row] = [(each, f"note {each}") for each in range(8)]
        harness.add(rows[0])
        target: list[Row] = []
        with opened(harness) as connector:
            while not target:
                apply_next(harness, connector, target)
            stored = connector.checkpoint()
        harness.add(*rows[1:6])
        harness.add(*rows[6:])
        for _ in rows:
            if len(target) < len(rows):
                with opened(harness, stored) as connector:
                    apply_next(harness, connector, target, 2)
                    stored = SourceCheckpoint.from_json(connector.checkpoint().to_json())
        assert target == rows, "every row must be delivered exactly once, even within a transaction"

    @rule(DOCUMENT, "checkpoint-enough", "restore()")
    def test_initial_checkpoint_can_be_restored(self, harness: ConnectorHarness) -> None:
        with opened(harness) as connector:
            unread = connector.checkpoint()
        rows: list[Row] = []
        for beginning in (SourceCheckpoint(), unread):
            rows.append((len(rows), "x"))
            harness.add(rows[-1])
            expected = rows if harness.replays else rows[-1:]
            with opened(harness, beginning) as connector:
                assert take(harness, connector, len(expected)) == expected

    @rule(DOCUMENT, "restore-first", "restore()")
    @rule("mistakes", "reader-before-restore")
    def test_restore_works_after_open(self, harness: ConnectorHarness) -> None:
        harness.add((1, "before"))
        with opened(harness) as connector:
            take(harness, connector, 1)
            stored = connector.checkpoint()
        connector = harness.connector()
        connector.open(harness.config())
        try:
            # A connector that starts to read in open() may have fetched the first row already.
            harness.add((2, "after"))
            connector.restore(stored)
            assert take(harness, connector, 1) == [(2, "after")]
        finally:
            connector.close()

    @rule(DOCUMENT, "restore-first", "restore()")
    def test_restore_after_polling_is_refused(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            take(harness, connector, 1)
            stored = connector.checkpoint()
            check_refused(lambda: connector.restore(stored), "restoring after polling")
            harness.add((2, "x"))
            assert take(harness, connector, 1) == [(2, "x")], "a refused checkpoint must have no effect"

    @rule(DOCUMENT, "checkpoint-enough")
    def test_checkpoint_right_after_restore_equals_the_restored_one(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            take(harness, connector, 1)
            stored = connector.checkpoint()
        with opened(harness, stored) as connector:
            assert connector.checkpoint() == stored
            harness.add((2, "x"))
            take(harness, connector, 1)
            assert connector.checkpoint().epoch > stored.epoch, "epoch numbers must increase across restarts"

    @rule(DOCUMENT, "restore()")
    def test_checkpoint_of_another_connector_is_refused(self, harness: ConnectorHarness) -> None:
        connector = harness.connector()
        connector.open(harness.config())
        foreign = SourceCheckpoint({"foreign partition": "foreign offset"}, 7, {"of": "another connector"})
        check_refused(lambda: connector.restore(foreign), "a checkpoint of another kind of connector")
        connector.close()

    @rule(DOCUMENT, "replay", "no-replay", "supports_replay()")
    def test_uncommitted_rows_are_redelivered_unless_replay_is_unsupported(
        self, harness: ConnectorHarness
    ) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            assert connector.supports_replay() == harness.replays
            take(harness, connector, 1)
            stored = connector.checkpoint()
            harness.add((2, "delivered, not durable"))
            take(harness, connector, 1)
        harness.add((3, "x"))
        with opened(harness, stored) as connector:
            expected: list[Row] = [(2, "delivered, not durable"), (3, "x")] if harness.replays else [(3, "x")]
            assert take(harness, connector, len(expected)) == expected
