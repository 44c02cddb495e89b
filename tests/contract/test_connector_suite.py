"""The connector conformance suite fails for implementations that break a rule."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pyarrow as pa
import pytest
from typing_extensions import override

from examples.list_connector import ListConnector
from penstock.contracts.connector import (
    ConnectorConfig,
    ConnectorMetrics,
    HealthStatus,
    SourceBatch,
    SourceCheckpoint,
    SourceConnector,
)
from penstock.contracts.schemas import SchemaProvider, SchemaRegistryAware
from penstock.errors import PenstockError
from penstock.testing.connector_conformance import SourceConnectorConformance
from penstock.testing.rules import suite_tests
from tests.support.contract.breaking import caught, caught_by
from tests.support.contract.list_harnesses import ListConnectorHarness

SUITE = SourceConnectorConformance


# --- lifecycle and polling ----------------------------------------------------------------------------------


@caught_by(SUITE.test_nothing_can_be_read_before_open_and_after_close)
class ReadsAfterClose(ListConnector):
    @override
    def close(self) -> None:
        topic = self._topic
        super().close()
        self._is_closed = False
        self._topic = topic


@caught_by(SUITE.test_closing_releases_everything_and_may_be_repeated)
class ClosesOnce(ListConnector):
    @override
    def close(self) -> None:
        if self._is_closed:
            raise RuntimeError("closed already")
        super().close()


@caught_by(
    SUITE.test_closing_releases_everything_and_may_be_repeated,
    SUITE.test_closing_an_unread_connector_releases_everything,
    SUITE.test_schema_can_be_discovered_before_open,
)
class StaysConnected(ListConnector):
    @override
    def open(self, config: ConnectorConfig) -> None:
        super().open(config)
        self._opened().waiting.add(threading.Event())

    @override
    def discover_schema(self, properties: ConnectorConfig) -> None:
        super().discover_schema(properties)
        other = ListConnector()
        other.open(properties)
        other._opened().waiting.add(threading.Event())


@caught_by(SUITE.test_every_row_is_delivered_once_and_in_order)
class PassesOverKeysThatAreNotPositive(ListConnector):
    @override
    def poll_batch(self, max_records: int) -> SourceBatch | None:
        batch = super().poll_batch(max_records)
        if batch is None:
            return None
        kept = batch.records.filter(pa.array([each > 0 for each in batch.records["id"].to_pylist()]))
        return SourceBatch(kept, batch.partition) if kept.num_rows else None


@caught_by(SUITE.test_none_does_not_end_the_batches)
class TakesNothingForTheEnd(ListConnector):
    is_over = False

    @override
    def poll_batch(self, max_records: int) -> SourceBatch | None:
        batch = None if self.is_over else super().poll_batch(max_records)
        self.is_over = batch is None
        return batch


@caught_by(SUITE.test_polling_does_not_wait_for_rows)
class WaitsForRows(ListConnector):
    polls = 0

    @override
    def poll_batch(self, max_records: int) -> SourceBatch | None:
        self.polls += 1
        if self.polls > 1:
            self._ready.wait()
        return super().poll_batch(max_records)


@caught_by(SUITE.test_limit_of_a_poll_loses_no_row)
class CutsOffWhatIsTooMuch(ListConnector):
    @override
    def poll_batch(self, max_records: int) -> SourceBatch | None:
        batch = super().poll_batch(1000)
        return None if batch is None else SourceBatch(batch.records.slice(0, max_records), batch.partition)


@caught_by(SUITE.test_no_batch_has_more_rows_than_the_poll_asked_for)
class ReturnsHeldRowsWhole(ListConnector):
    """Holds rows with another schema until the next poll, as many as the poll before asked for."""

    held: SourceBatch | None = None
    last: pa.Schema | None = None

    @override
    def poll_batch(self, max_records: int) -> SourceBatch | None:
        batch, self.held = self.held or super().poll_batch(max_records), None
        if batch is None:
            return None
        before, self.last = self.last, batch.records.schema
        if before not in (None, self.last):
            self.held = batch
        return None if self.held else batch


# --- checkpoints --------------------------------------------------------------------------------------------


@caught_by(SUITE.test_a_checkpoint_is_plain_and_survives_as_text)
class KeepsNumbersInItsCheckpoint(ListConnector):
    @override
    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint({"at": self._at}, self._at)  # type: ignore[dict-item]


@caught_by(SUITE.test_taking_a_checkpoint_has_no_effect, SUITE.test_only_a_committed_epoch_acknowledges)
class AcknowledgesInCheckpoint(ListConnector):
    @override
    def checkpoint(self) -> SourceCheckpoint:
        if self._topic is not None:
            self._topic.forgettable = self._at
        return super().checkpoint()


@caught_by(
    SUITE.test_every_checkpoint_can_be_resumed_from,
    SUITE.test_later_rows_can_be_resumed_from_any_checkpoint,
    SUITE.test_restore_works_after_open,
    SUITE.test_checkpoint_right_after_restore_equals_the_restored_one,
)
class BeginsAnew(ListConnector):
    @override
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        super().restore(checkpoint)
        self._at = 0


@caught_by(SUITE.test_initial_checkpoint_can_be_restored)
class KnowsNoBeginning(ListConnector):
    @override
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        super().restore(SourceCheckpoint(dict(checkpoint.offsets) or {"": ""}))


@caught_by(SUITE.test_restore_works_after_open)
class BeginsToReadInOpen(ListConnector):
    first: SourceBatch | None = None

    @override
    def open(self, config: ConnectorConfig) -> None:
        super().open(config)
        self.first = super().poll_batch(1)
        self._is_reading = False

    @override
    def poll_batch(self, max_records: int) -> SourceBatch | None:
        held, self.first = self.first, None
        return held or super().poll_batch(max_records)


@caught_by(SUITE.test_restore_after_polling_is_refused)
class RestoresAtAnyTime(ListConnector):
    @override
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        self._is_reading = False
        super().restore(checkpoint)


@caught_by(SUITE.test_checkpoint_of_another_connector_is_refused)
class TakesAnyCheckpoint(ListConnector):
    @override
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        try:
            super().restore(checkpoint)
        except PenstockError:
            self._at = 0


@caught_by(
    SUITE.test_uncommitted_rows_are_redelivered_unless_replay_is_unsupported,
    SUITE.test_an_epoch_covers_exactly_its_checkpoint,
)
class GoesOnWhereItWas(ListConnector):
    """Confirms returned records without storing them."""

    @override
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        super().restore(checkpoint)
        self._at = max(self._at, self._opened().forgettable)

    @override
    def poll_batch(self, max_records: int) -> SourceBatch | None:
        batch = super().poll_batch(max_records)
        self._opened().forgettable = self._at
        return batch


# --- acknowledging ------------------------------------------------------------------------------------------


@caught_by(SUITE.test_only_a_committed_epoch_acknowledges)
class NeverAcknowledges(ListConnector):
    @override
    def notify_epoch_committed(self, epoch: int) -> None:
        """Nothing."""


@caught_by(SUITE.test_epochs_may_be_notified_repeatedly_and_out_of_order)
class HoldsThatAnEpochComesOnce(ListConnector):
    @override
    def notify_epoch_committed(self, epoch: int) -> None:
        if epoch <= self._opened().forgettable:
            raise RuntimeError("reported before")
        super().notify_epoch_committed(epoch)


@caught_by(SUITE.test_unknown_epoch_acknowledges_nothing)
class TakesAnyEpoch(ListConnector):
    @override
    def notify_epoch_committed(self, epoch: int) -> None:
        self._opened().forgettable = epoch


# --- what it asks for ---------------------------------------------------------------------------------------


@caught_by(SUITE.test_event_is_set_when_rows_are_added)
class SignalsNobody(ListConnector):
    @override
    def data_ready(self) -> threading.Event | None:
        return threading.Event()


@caught_by(SUITE.test_event_is_cleared_while_there_are_no_rows)
class SignalsForEver(ListConnector):
    @override
    def poll_batch(self, max_records: int) -> SourceBatch | None:
        batch = super().poll_batch(max_records)
        self._ready.set()
        return batch


@caught_by(SUITE.test_schema_change_requests_a_checkpoint)
class NeverAsks(ListConnector):
    @override
    def poll_batch(self, max_records: int) -> SourceBatch | None:
        asked = self._wants_checkpoint.is_set()
        batch = super().poll_batch(max_records)
        if not asked:
            self._wants_checkpoint.clear()
        return batch


@caught_by(SUITE.test_only_the_consumer_clears_the_checkpoint_request)
class TakesItsRequestBack(ListConnector):
    @override
    def poll_batch(self, max_records: int) -> SourceBatch | None:
        self._wants_checkpoint.clear()
        return super().poll_batch(max_records)


# --- schemas ------------------------------------------------------------------------------------------------


@caught_by(SUITE.test_every_batch_has_the_columns_of_the_schema)
class PromisesColumns(ListConnector):
    @override
    def schema(self) -> pa.Schema:
        schema = super().schema()
        return schema.append(pa.field("more", pa.bool_())) if schema.names else schema


@caught_by(SUITE.test_schema_can_be_discovered_before_open)
class FindsNothingOut(ListConnector):
    @override
    def discover_schema(self, properties: ConnectorConfig) -> None:
        """Nothing."""


@caught_by(SUITE.test_schema_discovery_ends_and_raises_nothing)
class LooksForEver(ListConnector):
    @override
    def discover_schema(self, properties: ConnectorConfig) -> None:
        threading.Event().wait()


@caught_by(SUITE.test_schema_discovery_ends_and_raises_nothing)
class RaisesWhatItFinds(ListConnector):
    @override
    def discover_schema(self, properties: ConnectorConfig) -> None:
        if "topic" not in properties:
            raise RuntimeError("no topic")
        super().discover_schema(properties)


@caught_by(SUITE.test_schema_provider_returns_the_schema_of_each_partition)
class AnswersWithTheCatalogOfNow(ListConnector):
    @override
    def schema_of(self, partition: str, offset: str | None = None) -> pa.Schema | None:
        return super().schema_of(partition)


@caught_by(SUITE.test_schema_provider_returns_the_schema_of_each_partition)
class KnowsNoSchemas(ListConnector):
    @override
    def as_schema_provider(self) -> SchemaProvider | None:
        return None


@caught_by(SUITE.test_schemas_are_registered_if_the_connector_supports_it)
class PromisesARegistry(ListConnector):
    @override
    def as_schema_registry_aware(self) -> SchemaRegistryAware | None:
        return self  # type: ignore[return-value]


# --- how it is ----------------------------------------------------------------------------------------------


@caught_by(SUITE.test_health_check_works_at_any_time)
class IsNeverWell(ListConnector):
    @override
    def health_check(self) -> HealthStatus:
        return HealthStatus.unhealthy("always")


@caught_by(SUITE.test_health_check_works_at_any_time)
class IsAskedTooEarly(ListConnector):
    @override
    def health_check(self) -> HealthStatus:
        self._opened()
        return HealthStatus.HEALTHY


@caught_by(SUITE.test_metrics_count_delivered_rows)
class CountsBatches(ListConnector):
    batches = 0

    @override
    def poll_batch(self, max_records: int) -> SourceBatch | None:
        self.batches += 1
        return super().poll_batch(max_records)

    @override
    def metrics(self) -> ConnectorMetrics:
        return ConnectorMetrics(self.batches, self.batches)


class BrokenHarness(ListConnectorHarness):
    deadline_seconds = 0.3

    def __init__(self, broken: type[SourceConnector]) -> None:
        super().__init__()
        self._broken = broken

    @override
    def connector(self) -> SourceConnector:
        return self._broken()


OF_THE_CONTRACT_ITSELF = SUITE.test_optional_methods_have_defaults
TESTS = list(suite_tests(SUITE))


@pytest.mark.parametrize("test", [test for test in TESTS if test is not OF_THE_CONTRACT_ITSELF])
def test_broken_implementation_fails_the_suite(test: Callable[..., object]) -> None:
    assert caught.get(test), "no implementation is known that breaks this rule: is it one?"
    for broken in caught[test]:
        with pytest.raises((AssertionError, RuntimeError, PenstockError)):
            test(SUITE(), BrokenHarness(broken))


class NoReplay(ListConnector):
    """Rows that were returned cannot be read again, as from a socket."""

    @override
    def supports_replay(self) -> bool:
        return False

    @override
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        super().restore(checkpoint)
        self._at = self._given()[0]

    @override
    def poll_batch(self, max_records: int) -> SourceBatch | None:
        batch = super().poll_batch(max_records)
        self._given()[0] = self._at
        return batch

    def _given(self) -> list[int]:
        return vars(self._opened()).setdefault("given", [0])  # type: ignore[no-any-return]


class Plain(NoReplay):
    """A source without the optional capabilities."""

    discover_schema = SourceConnector.discover_schema
    health_check = SourceConnector.health_check
    metrics = SourceConnector.metrics
    data_ready = SourceConnector.data_ready
    checkpoint_requested = SourceConnector.checkpoint_requested
    as_schema_provider = SourceConnector.as_schema_provider
    notify_epoch_committed = SourceConnector.notify_epoch_committed


class PlainHarness(ListConnectorHarness):
    replays = signals = reshapes = acknowledges = discovers = provides_schemas = False

    @override
    def connector(self) -> SourceConnector:
        return Plain()


@pytest.mark.parametrize("test", TESTS)
def test_a_connector_with_none_of_the_capabilities_passes_too(test: Callable[..., object]) -> None:
    test(SUITE(), PlainHarness())
