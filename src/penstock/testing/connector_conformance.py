"""Conformance suite for `SourceConnector`.

Write a `ConnectorHarness` for the source. In a pytest module, subclass the suite and return a new harness for
each test from the fixture `harness`:

```python
class TestMyConnector(SourceConnectorConformance):
    @pytest.fixture
    def harness(self) -> MyHarness:
        return MyHarness()
```

For pytest to explain failed assertions, a conftest calls `pytest.register_assert_rewrite` with the names of
this module and of `penstock.testing.connector_harness`.

The harness declares the optional capabilities of the connector. The suite tests the declared capabilities,
and checks that the others are absent. `examples/list_connector.py` is an implementation of a hundred lines
that passes the suite.
"""

from __future__ import annotations

from penstock.contracts.connector import ConnectorMetrics, Health, HealthStatus, SourceCheckpoint
from penstock.testing.connector_harness import (
    DOCUMENT,
    MAX_RECORDS,
    Bare,
    ConnectorHarness,
    ConnectorReading,
    Row,
    check_refused,
    moved,
    next_batch,
    opened,
    take,
    until_none,
    wait_and_take,
)
from penstock.testing.rules import rule
from penstock.testing.streams import Background, wait_for

__all__ = ["ConnectorHarness", "Row", "SourceConnectorConformance"]


class SourceConnectorConformance(ConnectorReading):
    """One test per rule of the contract, here or in the base class; the test's name states the rule."""

    # --- acknowledging --------------------------------------------------------------------------------------

    @rule(DOCUMENT, "epoch-durable", "epoch-called", "notify_epoch_committed()")
    @rule("mistakes", "ack-in-checkpoint")
    def test_only_a_committed_epoch_acknowledges(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            take(harness, connector, 1)
            before = harness.acknowledged()
            harness.add((2, "x"))
            take(harness, connector, 1)
            until_none(harness, connector)
            stored = connector.checkpoint()
        assert harness.acknowledged() == before, "poll_batch, checkpoint and close must not acknowledge"
        with opened(harness, stored) as connector:
            harness.add((3, "x"))
            take(harness, connector, 1)
            assert harness.acknowledged() == before, "resuming from a checkpoint must not acknowledge"
            connector.notify_epoch_committed(stored.epoch)
            if harness.acknowledges:
                moved(harness, before)
        if not harness.acknowledges:
            assert harness.acknowledged() == before

    @rule(DOCUMENT, "epoch-durable")
    def test_an_epoch_covers_exactly_its_checkpoint(self, harness: ConnectorHarness) -> None:
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
            assert take(harness, connector, 1) == [(2, "x")], (
                "rows after the checkpoint must not be acknowledged"
            )

    @rule(DOCUMENT, "epoch-idempotent", "notify_epoch_committed()")
    def test_epochs_may_be_notified_repeatedly_and_out_of_order(self, harness: ConnectorHarness) -> None:
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
                assert take(harness, connector, 1) == [(4, "x")], (
                    "an older epoch must not acknowledge later rows"
                )

    @rule(DOCUMENT, "epoch-errors", "notify_epoch_committed()")
    def test_unknown_epoch_acknowledges_nothing(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            take(harness, connector, 1)
            before = harness.acknowledged()
            beyond = connector.checkpoint().epoch + 1000
            if harness.acknowledges:
                check_refused(
                    lambda: connector.notify_epoch_committed(beyond), "an epoch that no checkpoint had"
                )
            harness.add((2, "x"))
            assert take(harness, connector, 1) == [(2, "x")], (
                "the connector must keep working after the error"
            )
            assert harness.acknowledged() == before

    # --- events and checkpoint requests ---------------------------------------------------------------------

    @rule(DOCUMENT, "ready-signalled", "ready-awaited", "ready-called", "data_ready()")
    def test_event_is_set_when_rows_are_added(self, harness: ConnectorHarness) -> None:
        with opened(harness) as connector:
            event = connector.data_ready()
            assert (event is not None) == harness.signals
            if event is None:
                return
            assert connector.data_ready() is event, "data_ready must return the same event every time"
            for each in range(3):
                until_none(harness, connector)
                harness.add((each, "x"))
                assert wait_and_take(harness, connector, event) == (each, "x")

    @rule(DOCUMENT, "ready-awaited")
    def test_event_is_cleared_while_there_are_no_rows(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            event = connector.data_ready()
            take(harness, connector, 1)
            if event is not None:
                wait_for(
                    lambda: connector.poll_batch(MAX_RECORDS) is None and not event.is_set(),
                    "an event that is cleared while there are no rows",
                    event.is_set,
                    harness.deadline_seconds,
                )

    @rule(DOCUMENT, "flag", "flag-why", "checkpoint_requested()")
    def test_schema_change_requests_a_checkpoint(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            flag = connector.checkpoint_requested()
            if not harness.reshapes:
                return
            assert flag is not None
            assert connector.checkpoint_requested() is flag, (
                "checkpoint_requested must return the same flag every time"
            )
            shape = next_batch(harness, connector).records.schema
            until_none(harness, connector)
            flag.clear()
            harness.change_shape()
            harness.add((2, "x"))
            reshaped = next_batch(harness, connector)
            assert reshaped.records.schema != shape
            assert flag.is_set(), "a schema change must request a checkpoint"

    @rule(DOCUMENT, "flag-cleared")
    def test_only_the_consumer_clears_the_checkpoint_request(self, harness: ConnectorHarness) -> None:
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

    # --- schemas --------------------------------------------------------------------------------------------

    @rule(DOCUMENT, "arrow", "lifecycle", "schema()")
    def test_every_batch_has_the_columns_of_the_schema(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        connector = harness.connector()
        assert connector.schema().names == [], "the schema is empty before open"
        connector.open(harness.config())
        try:
            assert connector.schema().names, "open must read the schema"
            batch = next_batch(harness, connector)
            assert batch.records.num_rows > 0
            missing = [field for field in connector.schema() if field not in list(batch.records.schema)]
            assert missing == []
        finally:
            connector.close()

    @rule(DOCUMENT, "discover-early", "discover_schema()")
    def test_schema_can_be_discovered_before_open(self, harness: ConnectorHarness) -> None:
        before = harness.open_resources()
        connector = harness.connector()
        Background(lambda: connector.discover_schema(harness.config())).result(
            harness.deadline_seconds, "the result of discover_schema"
        )
        assert bool(connector.schema().names) == harness.discovers
        discovered = connector.schema()
        wait_for(
            lambda: harness.open_resources() == before,
            f"the resources of before, {before},",
            harness.open_resources,
            harness.deadline_seconds,
        )
        connector.open(harness.config())
        assert not harness.discovers or connector.schema() == discovered
        connector.close()

    @rule(DOCUMENT, "discover-bounded", "discover_schema()")
    def test_schema_discovery_ends_and_raises_nothing(self, harness: ConnectorHarness) -> None:
        for config in (harness.unreachable(), {}):
            connector = harness.connector()
            looking = Background(lambda connector=connector, config=config: connector.discover_schema(config))  # type: ignore[misc]
            looking.result(harness.deadline_seconds, "the result of discover_schema on an unreachable source")
            assert connector.schema().names == [], "an unknown schema is empty"
            connector.close()

    @rule(DOCUMENT, "schema-provider", "as_schema_provider()")
    def test_schema_provider_returns_the_schema_of_each_partition(self, harness: ConnectorHarness) -> None:
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
                assert provider.schema_of(batch.partition, early) == batch.records.schema, (
                    "the schema as of that offset"
                )

    @rule(DOCUMENT, "registry-aware", "as_schema_registry_aware()")
    def test_schemas_are_registered_if_the_connector_supports_it(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            partition = next_batch(harness, connector).partition
            aware = connector.as_schema_registry_aware()
            assert (aware is not None) == harness.registers_schemas
            if aware is None:
                return
            assert aware.look_up_schema(partition) is None
            assert aware.check_compatibility(partition).is_compatible
            assert aware.look_up_schema(partition) is None, "check_compatibility must not register the schema"
            registered = aware.register_schema(partition)
            assert registered.subject == aware.subject_of(partition)
            assert aware.register_schema(partition) == registered, (
                "registering a schema again returns the same version"
            )
            assert aware.look_up_schema(partition) == registered
            assert aware.look_up_schema(partition, registered.version) == registered
            assert aware.look_up_schema(partition, registered.version + 1) is None

    # --- health and metrics ---------------------------------------------------------------------------------

    @rule(DOCUMENT, "health_check()")
    def test_health_check_works_at_any_time(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        connector = harness.connector()
        found = [connector.health_check()]
        connector.open(harness.config())
        found.append(connector.health_check())
        take(harness, connector, 1)
        found.append(
            Background(connector.health_check).result(
                harness.deadline_seconds, "a health check in another thread"
            )
        )
        connector.close()
        found.append(connector.health_check())
        assert all(isinstance(status, HealthStatus) for status in found)
        assert found[2].health not in (Health.UNHEALTHY, Health.DEGRADED), (
            f"the connector has just delivered a row: {found[2].why}"
        )

    @rule(DOCUMENT, "metrics-now", "metrics()")
    def test_metrics_count_delivered_rows(self, harness: ConnectorHarness) -> None:
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
                return  # the connector has no metrics
            assert after.records_total - before.records_total == sum(
                batch.records.num_rows for batch in batches
            )
            assert after.bytes_total > before.bytes_total
            assert after.errors_total == 0
        finally:
            connector.close()

    @rule(DOCUMENT, "health-unknown", "ready-default", "replay-default", "flag-default")
    def test_optional_methods_have_defaults(self, harness: ConnectorHarness) -> None:
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
