"""The rules of `SourceConnector`, as tests that any implementation can run.

Write a `ConnectorHarness` for the source, and in a pytest module a subclass that gives it as the fixture `harness`, fresh for each test:

```python
class TestMyConnector(SourceConnectorConformance):
    @pytest.fixture
    def harness(self) -> MyHarness:
        return MyHarness()
```

For pytest to explain failed assertions, `pytest.register_assert_rewrite("penstock.testing.connector_conformance")` in a conftest.

A capability that is optional is tested where the harness says that it is there, and must be absent where it says that it is not.
`examples/list_connector.py` is an implementation in a hundred lines that passes.
"""

from __future__ import annotations

import gc
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa

from penstock.contracts.connector import (
    ConnectorConfig,
    ConnectorMetrics,
    Health,
    HealthStatus,
    SourceBatch,
    SourceCheckpoint,
    SourceConnector,
)
from penstock.errors import ConnectorError
from penstock.testing.rules import rule
from penstock.testing.streams import Background, wait_for

Row = tuple[int, str | None]
"""`id` and `note`."""

MAX_RECORDS = 1000

rule_of = "source_connector"


class ConnectorHarness(ABC):
    """The source behind a connector: rows with the columns `id` (a number) and `note` (a text or NULL), to which rows are added.

    What is there when a connector is opened for the first time is delivered, before what is added later.
    """

    deadline_seconds = 30.0
    replays = True
    signals = True
    """Whether it has an event that is set when there is data."""
    reshapes = True
    """Whether its rows can change their shape; then it asks for a checkpoint when they do."""
    acknowledges = True
    """Whether the source is told what it may forget."""
    discovers = True
    """Whether the schema can be had before `open`."""
    provides_schemas = True
    registers_schemas = False
    """Whether `config` names a schema registry."""

    @abstractmethod
    def connector(self) -> SourceConnector:
        """As a process that has just started would make it."""

    @abstractmethod
    def config(self) -> ConnectorConfig:
        """What it is opened with."""

    @abstractmethod
    def unreachable(self) -> ConnectorConfig:
        """The same for a source that does not answer, and never will."""

    @abstractmethod
    def add(self, *rows: Row) -> None:
        """Add rows to the source, for good, and return."""

    def change_shape(self) -> None:  # noqa: B027 - for sources that can
        """Give the rows that are added from now on another shape, such as one more column."""

    def acknowledged(self) -> object:
        """How much the source has been told that it may forget; the same value for as long as it has been told nothing else."""
        return None

    def apply(self, target: list[Row], records: pa.RecordBatch) -> None:
        """What a batch does to a target. For a source that may begin again, a batch that says so empties it first."""
        target += zip(*(records.column(name).to_pylist() for name in ("id", "note")), strict=True)

    def offset_of(self, checkpoint: SourceCheckpoint, partition: str) -> str:
        """Where a checkpoint stands in a partition."""
        return checkpoint.offsets[partition]

    def open_resources(self) -> object:
        """What is open now: connections, threads, whatever can be counted. It must be the same after `close` as before `open`."""
        return None


class SourceConnectorConformance:
    """Every rule of the contract has a test here, and its name says which."""

    # --- lifecycle ------------------------------------------------------------------------------------------------------

    @rule(rule_of, "lifecycle", "open-once", "open()", "close()")
    def test_nothing_can_be_read_before_open_and_after_close(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        connector = harness.connector()
        check_refused(lambda: connector.poll_batch(1), "polling before open")
        connector.open(harness.config())
        check_refused(lambda: connector.open(harness.config()), "opening twice")
        take(harness, connector, 1)
        connector.close()
        check_refused(lambda: connector.poll_batch(1), "polling after close")

    @rule(rule_of, "lifecycle", "close()")
    def test_closing_releases_everything_and_may_be_repeated(self, harness: ConnectorHarness) -> None:
        harness.connector().close()
        before = harness.open_resources()
        harness.add((1, "x"))
        connector = harness.connector()
        connector.open(harness.config())
        take(harness, connector, 1)
        connector.close()
        connector.close()
        wait_for(lambda: harness.open_resources() == before, f"as before, {before},", harness.open_resources, harness.deadline_seconds)

    @rule(rule_of, "close()")
    def test_closing_what_was_never_read_releases_everything(self, harness: ConnectorHarness) -> None:
        before = harness.open_resources()
        connector = harness.connector()
        connector.open(harness.config())
        connector.close()
        wait_for(lambda: harness.open_resources() == before, f"as before, {before},", harness.open_resources, harness.deadline_seconds)

    # --- polling --------------------------------------------------------------------------------------------------------

    @rule(rule_of, "lifecycle", "poll_batch()")
    def test_every_row_comes_once_and_in_order(self, harness: ConnectorHarness) -> None:
        rows: list[Row] = [(-1, "negative"), (0, ""), (1, None), (2, "NULL"), (3, "\N{SNOWMAN}\n")]
        harness.add(*rows[:3])
        with opened(harness) as connector:
            target = take(harness, connector, 3)
            harness.add(rows[3])
            harness.add(rows[4])
            assert target + take(harness, connector, 2) == rows
            check_nothing_else(harness, connector)

    @rule(rule_of, "poll-none", "poll_batch()")
    def test_none_means_nothing_now_and_never_the_end(self, harness: ConnectorHarness) -> None:
        with opened(harness) as connector:
            for each in range(3):
                until_none(harness, connector)
                harness.add((each, "x"))
                assert take(harness, connector, 1) == [(each, "x")]

    @rule(rule_of, "poll-none")
    def test_polling_does_not_wait_for_rows(self, harness: ConnectorHarness) -> None:
        with opened(harness) as connector:
            until_none(harness, connector)
            polled = Background(lambda: connector.poll_batch(MAX_RECORDS)).result(
                harness.deadline_seconds, "an answer although there is nothing"
            )
            assert polled is None

    @rule(rule_of, "max-records")
    def test_no_row_is_lost_to_the_number_that_is_asked_for(self, harness: ConnectorHarness) -> None:
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

    # --- checkpoints ----------------------------------------------------------------------------------------------------

    @rule(rule_of, "checkpoint()")
    def test_a_checkpoint_is_plain_and_survives_as_text(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            check_plain(connector.checkpoint())
            take(harness, connector, 1)
            check_plain(connector.checkpoint())

    @rule(rule_of, "checkpoint()")
    def test_taking_a_checkpoint_has_no_effect(self, harness: ConnectorHarness) -> None:
        rows: list[Row] = [(each, "x") for each in range(4)]
        harness.add(*rows[:2])
        with opened(harness) as connector:
            target = take(harness, connector, 2)
            until_none(harness, connector)
            acknowledged = harness.acknowledged()
            taken = [connector.checkpoint() for _ in range(3)]
            assert taken[0] == taken[1] == taken[2], "nothing was read in between, so it is one place"
            harness.add(*rows[2:])
            assert target + take(harness, connector, 2) == rows
            assert harness.acknowledged() == acknowledged, "a checkpoint acknowledges nothing: nobody knows whether it will be stored"

    @rule(rule_of, "checkpoint-enough", "restore()", "lifecycle")
    def test_every_checkpoint_is_enough_to_go_on_from(self, harness: ConnectorHarness) -> None:
        """In ever longer runs: a source that must begin again with what was there at first gets on all the same."""
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
            if len(target) >= len(rows) or not harness.replays:
                break
        assert target == (rows if harness.replays else rows[: len(target)]), "nothing is missing, and nothing comes twice"
        harness.add((99, "mark"))
        with opened(harness, stored) as connector:
            assert take(harness, connector, 1) == [(99, "mark")]

    @rule(rule_of, "checkpoint-enough", "restore()")
    def test_what_is_added_later_goes_on_from_any_checkpoint_too(self, harness: ConnectorHarness) -> None:
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
        assert target == rows, "nothing is missing, and nothing comes twice, be it in the middle of a transaction"

    @rule(rule_of, "restore-first", "restore()")
    def test_a_checkpoint_counts_although_the_connector_is_open_already(self, harness: ConnectorHarness) -> None:
        harness.add((1, "before"))
        with opened(harness) as connector:
            take(harness, connector, 1)
            stored = connector.checkpoint()
        connector = harness.connector()
        connector.open(harness.config())
        try:
            # Whoever begins to read in open() has the first row on its way by now.
            harness.add((2, "after"))
            connector.restore(stored)
            assert take(harness, connector, 1) == [(2, "after")]
        finally:
            connector.close()

    @rule(rule_of, "restore-first", "restore()")
    def test_a_checkpoint_comes_too_late_once_reading_has_started(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            take(harness, connector, 1)
            stored = connector.checkpoint()
            check_refused(lambda: connector.restore(stored), "restoring after polling")
            harness.add((2, "x"))
            assert take(harness, connector, 1) == [(2, "x")], "a refused checkpoint changes nothing"

    @rule(rule_of, "checkpoint-enough")
    def test_right_after_restore_the_place_is_the_one_of_the_checkpoint(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            take(harness, connector, 1)
            stored = connector.checkpoint()
        with opened(harness, stored) as connector:
            assert connector.checkpoint() == stored
            harness.add((2, "x"))
            take(harness, connector, 1)
            assert connector.checkpoint().epoch > stored.epoch, "epochs go on, so that none is taken for an earlier one"

    @rule(rule_of, "restore()")
    def test_a_checkpoint_of_something_else_is_refused(self, harness: ConnectorHarness) -> None:
        connector = harness.connector()
        connector.open(harness.config())
        foreign = SourceCheckpoint({"nothing of yours": "no offset"}, 7, {"of": "somebody else"})
        check_refused(lambda: connector.restore(foreign), "a checkpoint that no connector of this kind wrote")
        connector.close()

    @rule(rule_of, "replay", "no-replay", "supports_replay()")
    def test_what_was_not_made_durable_comes_again_or_the_connector_says_that_it_cannot(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            assert connector.supports_replay() == harness.replays
            take(harness, connector, 1)
            stored = connector.checkpoint()
            harness.add((2, "given out, not durable"))
            take(harness, connector, 1)
        harness.add((3, "x"))
        with opened(harness, stored) as connector:
            expected: list[Row] = [(2, "given out, not durable"), (3, "x")] if harness.replays else [(3, "x")]
            assert take(harness, connector, len(expected)) == expected

    # --- acknowledging --------------------------------------------------------------------------------------------------

    @rule(rule_of, "epoch-durable", "epoch-called", "notify_epoch_committed()")
    def test_only_a_committed_epoch_acknowledges(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            take(harness, connector, 1)
            before = harness.acknowledged()
            harness.add((2, "x"))
            take(harness, connector, 1)
            until_none(harness, connector)
            stored = connector.checkpoint()
        assert harness.acknowledged() == before, "neither polling nor a checkpoint nor closing acknowledges anything"
        with opened(harness, stored) as connector:
            connector.poll_batch(MAX_RECORDS)
            connector.notify_epoch_committed(stored.epoch)
            if harness.acknowledges:
                moved(harness, before)
        if not harness.acknowledges:
            assert harness.acknowledged() == before

    @rule(rule_of, "epoch-durable")
    def test_an_epoch_covers_what_its_checkpoint_covers_and_no_more(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            take(harness, connector, 1)
            stored = connector.checkpoint()
            harness.add((2, "x"))
            take(harness, connector, 1)
            connector.notify_epoch_committed(stored.epoch)
        if not harness.replays:
            return
        with opened(harness, stored) as connector:
            assert take(harness, connector, 1) == [(2, "x")], "it came after the checkpoint, and was not acknowledged with it"

    @rule(rule_of, "epoch-idempotent", "notify_epoch_committed()")
    def test_an_epoch_may_be_told_again_and_an_older_one_too(self, harness: ConnectorHarness) -> None:
        rows: list[Row] = [(1, "x"), (2, "x"), (3, "x")]
        epochs: list[int] = []
        stored = SourceCheckpoint()
        with opened(harness) as connector:
            for row in rows:
                harness.add(row)
                take(harness, connector, 1)
                stored = connector.checkpoint()
                epochs.append(stored.epoch)
            for epoch in (*epochs, *epochs, epochs[0], epochs[2]):
                connector.notify_epoch_committed(epoch)
            harness.add((4, "x"))
            assert take(harness, connector, 1) == [(4, "x")]
        with opened(harness, stored) as connector:
            for epoch in (epochs[2], epochs[0], epochs[2]):
                connector.notify_epoch_committed(epoch)
            if harness.replays:
                assert take(harness, connector, 1) == [(4, "x")], "the older epochs acknowledged nothing that came after them"

    @rule(rule_of, "epoch-errors", "notify_epoch_committed()")
    def test_an_epoch_that_was_never_given_out_acknowledges_nothing(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            take(harness, connector, 1)
            before = harness.acknowledged()
            beyond = connector.checkpoint().epoch + 1000
            if harness.acknowledges:
                check_refused(lambda: connector.notify_epoch_committed(beyond), "an epoch that nobody has seen")
            harness.add((2, "x"))
            assert take(harness, connector, 1) == [(2, "x")], "the connector goes on"
            assert harness.acknowledged() == before

    # --- what it asks for -----------------------------------------------------------------------------------------------

    @rule(rule_of, "ready-signalled", "ready-awaited", "ready-called", "data_ready()")
    def test_the_event_wakes_who_waits_for_rows(self, harness: ConnectorHarness) -> None:
        with opened(harness) as connector:
            event = connector.data_ready()
            assert (event is not None) == harness.signals
            if event is None:
                return
            assert connector.data_ready() is event, "there is one event, not one for each who asks"
            for each in range(3):
                until_none(harness, connector)
                harness.add((each, "x"))
                assert wait_and_take(harness, connector, event) == (each, "x")

    @rule(rule_of, "ready-awaited")
    def test_the_event_is_not_set_for_ever(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            event = connector.data_ready()
            take(harness, connector, 1)
            if event is not None:
                wait_for(
                    lambda: connector.poll_batch(MAX_RECORDS) is None and not event.is_set(),
                    "an event that is not set while there is nothing",
                    event.is_set,
                    harness.deadline_seconds,
                )

    @rule(rule_of, "flag", "flag-why", "checkpoint_requested()")
    def test_a_checkpoint_is_asked_for_when_the_shape_changes(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            flag = connector.checkpoint_requested()
            if not harness.reshapes:
                return
            assert flag is not None
            assert connector.checkpoint_requested() is flag, "there is one flag, not one for each who asks"
            shape = next_batch(harness, connector).records.schema
            until_none(harness, connector)
            flag.clear()
            harness.change_shape()
            harness.add((2, "x"))
            reshaped = next_batch(harness, connector)
            assert reshaped.records.schema != shape
            assert flag.is_set(), "rows of another shape came, and nobody asked for a checkpoint"

    @rule(rule_of, "flag-cleared")
    def test_only_the_consumer_takes_the_request_back(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            flag = connector.checkpoint_requested()
            if flag is None:
                return
            flag.set()
            take(harness, connector, 1)
            until_none(harness, connector)
            connector.notify_epoch_committed(connector.checkpoint().epoch)
            assert flag.is_set()
            flag.clear()
            until_none(harness, connector)
            assert connector.checkpoint_requested() is flag

    # --- schemas --------------------------------------------------------------------------------------------------------

    @rule(rule_of, "lifecycle", "schema()")
    def test_every_batch_has_the_columns_of_the_schema(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        connector = harness.connector()
        assert connector.schema().names == [], "nobody has looked yet"
        connector.open(harness.config())
        try:
            assert connector.schema().names, "open finds out the schema"
            batch = next_batch(harness, connector)
            assert batch.records.num_rows > 0
            missing = [field for field in connector.schema() if field not in list(batch.records.schema)]
            assert missing == []
        finally:
            connector.close()

    @rule(rule_of, "discover-early", "discover_schema()")
    def test_the_schema_can_be_found_out_before_open(self, harness: ConnectorHarness) -> None:
        before = harness.open_resources()
        connector = harness.connector()
        Background(lambda: connector.discover_schema(harness.config())).result(harness.deadline_seconds, "an end of looking for the schema")
        assert bool(connector.schema().names) == harness.discovers
        discovered = connector.schema()
        wait_for(lambda: harness.open_resources() == before, f"as before, {before},", harness.open_resources, harness.deadline_seconds)
        connector.open(harness.config())
        assert not harness.discovers or connector.schema() == discovered
        connector.close()

    @rule(rule_of, "discover-bounded", "discover_schema()")
    def test_looking_for_the_schema_ends_and_raises_nothing(self, harness: ConnectorHarness) -> None:
        for config in (harness.unreachable(), {}):
            connector = harness.connector()
            looking = Background(lambda connector=connector, config=config: connector.discover_schema(config))  # type: ignore[misc]
            looking.result(harness.deadline_seconds, "an end of looking for the schema of a source that does not answer")
            assert connector.schema().names == [], "what was not found out is left empty"
            connector.close()

    @rule(rule_of, "schema-provider", "as_schema_provider()")
    def test_the_schema_of_each_partition_is_known_where_that_is_promised(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            provider = connector.as_schema_provider()
            assert (provider is not None) == harness.provides_schemas
            if provider is None:
                return
            batch = next_batch(harness, connector)
            assert batch.partition in provider.partitions()
            assert provider.schema_of(batch.partition) == batch.records.schema
            until_none(harness, connector)
            early = harness.offset_of(connector.checkpoint(), batch.partition)
            if harness.reshapes:
                harness.change_shape()
                harness.add((2, "x"))
                reshaped = next_batch(harness, connector)
                assert provider.schema_of(batch.partition) == reshaped.records.schema
                assert provider.schema_of(batch.partition, early) == batch.records.schema, "as it was at that place"

    @rule(rule_of, "registry-aware", "as_schema_registry_aware()")
    def test_schemas_are_kept_in_a_registry_where_that_is_promised(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            partition = next_batch(harness, connector).partition
            aware = connector.as_schema_registry_aware()
            assert (aware is not None) == harness.registers_schemas
            if aware is None:
                return
            assert aware.look_up_schema(partition) is None
            assert aware.check_compatibility(partition).is_compatible
            assert aware.look_up_schema(partition) is None, "checking registers nothing"
            registered = aware.register_schema(partition)
            assert registered.subject == aware.subject_of(partition)
            assert aware.register_schema(partition) == registered, "the same schema is not added twice"
            assert aware.look_up_schema(partition) == registered
            assert aware.look_up_schema(partition, registered.version) == registered
            assert aware.look_up_schema(partition, registered.version + 1) is None

    # --- how it is ------------------------------------------------------------------------------------------------------

    @rule(rule_of, "health_check()")
    def test_health_can_be_asked_at_any_time(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        connector = harness.connector()
        found = [connector.health_check()]
        connector.open(harness.config())
        found.append(connector.health_check())
        take(harness, connector, 1)
        found.append(Background(connector.health_check).result(harness.deadline_seconds, "an answer in another thread"))
        connector.close()
        found.append(connector.health_check())
        assert all(isinstance(status, HealthStatus) for status in found)
        assert found[2].health not in (Health.UNHEALTHY, Health.DEGRADED), f"it has just given out a row: {found[2].why}"

    @rule(rule_of, "metrics-now", "metrics()")
    def test_metrics_count_what_was_given_out(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"), (2, "x"))
        connector = harness.connector()
        assert connector.metrics().records_total == 0
        connector.open(harness.config())
        try:
            before = connector.metrics()
            batches = [next_batch(harness, connector)]
            while sum(batch.records.num_rows for batch in batches) < 2:
                batches.append(next_batch(harness, connector))
            after = connector.metrics()
            if after == before:
                return  # it does not count
            assert after.records_total - before.records_total == sum(batch.records.num_rows for batch in batches)
            assert after.bytes_total > before.bytes_total
            assert after.errors_total == 0
        finally:
            connector.close()

    @rule(rule_of, "health-unknown", "ready-default", "replay-default", "flag-default")
    def test_who_implements_only_what_is_required_has_the_defaults(self, harness: ConnectorHarness) -> None:
        connector = Bare()
        connector.discover_schema(harness.config())
        connector.notify_epoch_committed(7)
        assert connector.schema().names == []
        assert connector.health_check() == HealthStatus.UNKNOWN
        assert connector.metrics() == ConnectorMetrics()
        assert connector.data_ready() is None
        assert connector.as_schema_provider() is None
        assert connector.as_schema_registry_aware() is None
        assert connector.supports_replay() is True
        assert connector.checkpoint_requested() is None


# --- what the tests are made of -----------------------------------------------------------------------------------------------


class Bare(SourceConnector):
    """Has the six methods that are required, and nothing to give."""

    def open(self, config: ConnectorConfig) -> None:
        """Nothing to open."""

    def poll_batch(self, max_records: int) -> SourceBatch | None:
        return None

    def schema(self) -> pa.Schema:
        return pa.schema([])

    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint()

    def restore(self, checkpoint: SourceCheckpoint) -> None:
        """Nothing to go on from."""

    def close(self) -> None:
        """Nothing to close."""


@contextmanager
def opened(harness: ConnectorHarness, stored: SourceCheckpoint | None = None) -> Iterator[SourceConnector]:
    connector = harness.connector()
    connector.open(harness.config())
    try:
        if stored is not None:
            connector.restore(stored)
        yield connector
    finally:
        connector.close()
        del connector
        gc.collect()


def next_batch(harness: ConnectorHarness, connector: SourceConnector, max_records: int = MAX_RECORDS) -> SourceBatch:
    """Ask until something comes."""
    deadline = time.monotonic() + harness.deadline_seconds
    while True:
        batch = connector.poll_batch(max_records)
        if batch is not None:
            assert batch.records.num_rows > 0, "a batch has rows"
            return batch
        assert time.monotonic() < deadline, f"no batch came within {harness.deadline_seconds:g} s"
        time.sleep(0.01)


def apply_next(harness: ConnectorHarness, connector: SourceConnector, target: list[Row], max_records: int = MAX_RECORDS) -> None:
    harness.apply(target, next_batch(harness, connector, max_records).records)


def take(harness: ConnectorHarness, connector: SourceConnector, count: int) -> list[Row]:
    """The next rows, so many at least."""
    target: list[Row] = []
    while len(target) < count:
        apply_next(harness, connector, target)
    return target


def wait_and_take(harness: ConnectorHarness, connector: SourceConnector, event: threading.Event) -> Row:
    """As a consumer does that asks only when it is woken."""
    target: list[Row] = []
    while not target:
        assert event.wait(harness.deadline_seconds), "a row was added, and nobody was woken"
        batch = connector.poll_batch(MAX_RECORDS)
        if batch is not None:
            harness.apply(target, batch.records)
    return target[0]


def until_none(harness: ConnectorHarness, connector: SourceConnector) -> None:
    """Ask until there is nothing; what comes was there before, or is no row."""
    deadline = time.monotonic() + harness.deadline_seconds
    while connector.poll_batch(MAX_RECORDS) is not None:
        assert time.monotonic() < deadline, "it always has something"


def check_nothing_else(harness: ConnectorHarness, connector: SourceConnector) -> None:
    """By a mark behind which nothing has to be waited for."""
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
    wait_for(lambda: harness.acknowledged() != before, f"other than {before}", harness.acknowledged, harness.deadline_seconds)
