"""Contract of source connectors: rows as Arrow batches, checkpoints, and one method that acknowledges them.

The consumer calls, in this order: `open`, `restore` if it has a checkpoint, `poll_batch` in a loop with
`checkpoint` in between, `notify_epoch_committed` whenever a checkpoint and all rows before it are durable,
then `close`. `SourceConnectorConformance` in `penstock.testing` checks implementations against these rules.

A loop with exactly-once results, for a target that commits rows and checkpoint atomically:

```python
connector.open(config)
if stored is not None:
    connector.restore(stored)
    acknowledge(stored.epoch)  # the last run may have stopped before this call
while True:
    batch = connector.poll_batch(10_000)
    if batch is not None:
        pending.append(batch)
    if batch is None or flag.is_set():  # if the connector has a flag
        flag.clear()
        checkpoint = connector.checkpoint()
        target.commit(pending, checkpoint)
        acknowledge(checkpoint.epoch)


def acknowledge(epoch):
    try:
        connector.notify_epoch_committed(epoch)
    except PenstockError:  # the commit is valid, and a later epoch covers this one
        log.warning("epoch not acknowledged", exc_info=True)
```
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import ClassVar, Self, TypeAlias

import pyarrow as pa

from penstock.contracts.schemas import SchemaProvider, SchemaRegistryAware
from penstock.errors import CheckpointError

ConnectorConfig: TypeAlias = Mapping[str, str]
"""Options of a connector, by name. All values are text, so any file, statement or option list can contain
them.
"""

CHECKPOINT_VERSION = 1
"""Version of the JSON form of a checkpoint. Higher versions are rejected."""


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """Rows of one partition, in order; at least one."""

    records: pa.RecordBatch
    partition: str
    """The part of the source that the rows come from: a table, a partition of a topic, a file. Rows are
    ordered within a partition only.
    """


@dataclass(frozen=True, slots=True)
class SourceCheckpoint:
    """Progress of a consumer. Plain data: any storage can hold it, and another process, another version or a
    person can read it.

    Only a connector of the same kind can interpret it; the consumer stores it unchanged. An empty checkpoint
    is the beginning.
    """

    offsets: Mapping[str, str] = field(default_factory=dict)
    """Offsets by partition, or by any other part of the stream that the connector tracks separately."""
    epoch: int = 0
    """The number of times that the position has moved; the argument of `notify_epoch_committed`. After
    `restore`, the connector continues to count from this number.
    """
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Further data needed to resume, and to recognise checkpoints of another source. Never a secret."""

    def to_json(self) -> str:
        """The checkpoint as JSON. Equal checkpoints have the same text, regardless of the writer."""
        document = {
            "version": CHECKPOINT_VERSION,
            "epoch": self.epoch,
            "offsets": dict(self.offsets),
            "metadata": dict(self.metadata),
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote, or raise `CheckpointError`."""
        try:
            document = json.loads(text)
            version = document["version"]
            offsets, epoch, metadata = document["offsets"], document["epoch"], document["metadata"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError("the text is not a checkpoint", hint=_RESTART_HINT) from error
        if not isinstance(version, int) or not 1 <= version <= CHECKPOINT_VERSION:
            raise CheckpointError(
                f"the checkpoint has version {version!r}; this version of penstock reads up to "
                f"{CHECKPOINT_VERSION}",
                hint="run the version of penstock that wrote it, or a newer one",
            )
        if not (_is_plain(offsets) and _is_plain(metadata) and isinstance(epoch, int) and epoch >= 0):
            raise CheckpointError("the checkpoint has a value of the wrong type", hint=_RESTART_HINT)
        return cls(offsets, epoch, metadata)


_RESTART_HINT = (
    "restore an earlier checkpoint, or start without one, which reads the source from its beginning"
)


def _is_plain(values: object) -> bool:
    return isinstance(values, dict) and all(
        isinstance(key, str) and isinstance(value, str) for key, value in values.items()
    )


class Health(Enum):
    """The four states of a connector."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """It works, but needs attention."""
    UNHEALTHY = "unhealthy"
    """It does not work."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """Health of a connector, with a reason if it is degraded or unhealthy."""

    health: Health
    why: str | None = None

    HEALTHY: ClassVar[HealthStatus]
    UNKNOWN: ClassVar[HealthStatus]

    def __post_init__(self) -> None:
        needs_reason = self.health in (Health.DEGRADED, Health.UNHEALTHY)
        if needs_reason != bool(self.why):
            raise ValueError(f"{self.health.value} {'needs a reason' if needs_reason else 'has no reason'}")

    @classmethod
    def degraded(cls, why: str) -> HealthStatus:
        return cls(Health.DEGRADED, why)

    @classmethod
    def unhealthy(cls, why: str) -> HealthStatus:
        return cls(Health.UNHEALTHY, why)


HealthStatus.HEALTHY = HealthStatus(Health.HEALTHY)
HealthStatus.UNKNOWN = HealthStatus(Health.UNKNOWN)


@dataclass(frozen=True, slots=True)
class ConnectorMetrics:
    """Figures since `open`. Names of counters end in `_total`."""

    records_total: int = 0
    """Rows that `poll_batch` returned."""
    bytes_total: int = 0
    """Size in memory of the rows that `poll_batch` returned."""
    errors_total: int = 0
    """Errors, including those that the connector recovered from."""
    lag: int | None = None
    """Distance between the returned rows and the source, in the source's own unit; None if unknown."""
    custom: Mapping[str, float] = field(default_factory=dict)


class SourceConnector(ABC):
    """Reads a source in batches, from a checkpoint on.

    Call `open`, `restore`, `poll_batch`, `checkpoint` and `close` from one thread at a time.
    `notify_epoch_committed`, `health_check` and `metrics` may be called from any thread. Errors are
    subclasses of `PenstockError`; `ConnectorStateError` reports a call in the wrong order.
    """

    # --- required -------------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, config: ConnectorConfig) -> None:
        """Connect to the source and determine the schema.

        Called once, before everything except `discover_schema`. It must not start reading: the start position
        is known only after `restore` or, if `restore` is not called, at the first `poll_batch`. Raises an
        error if the connector cannot be used, for example for an invalid option.
        """

    @abstractmethod
    def poll_batch(self, max_records: int) -> SourceBatch | None:
        """The next rows, or None if there are none *now*: call again later, or when the event of `data_ready`
        is set.

        Called in a loop; the first call starts reading. `max_records`, at least one, is a hint: a batch may
        have fewer rows even if more are available, but never more. The call does not wait for rows. Usual
        mistake: taking the first None for the end of a snapshot. None never means an end. An error that ended
        reading is raised after all rows before it were returned; the connector can then only be closed.
        """

    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns that every batch has, in every partition. Empty if unknown, for example before `open`.

        If partitions differ, a batch has further columns, which `as_schema_provider` describes.
        """

    @abstractmethod
    def checkpoint(self) -> SourceCheckpoint:
        """The position after the last row that `poll_batch` returned: sufficient to resume there, in another
        process, after a restart.

        Called any number of times, at least whenever the consumer makes its work durable. Cheap and without
        side effects: no request to a server, and no acknowledgement, because the checkpoint may never be
        stored.
        """

    @abstractmethod
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        """Continue from `checkpoint` instead of the beginning.

        Called at most once, during recovery, after `open` and before the first `poll_batch`; later it raises
        `ConnectorStateError`. Raises `CheckpointError` for a checkpoint of another source, and a gap error if
        the changes after the checkpoint are no longer available. It never continues at another position
        instead.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything: connections, threads, locks. Acknowledges nothing. May be called more than
        once, and without `open`.

        A `with` block calls it at its end.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- with defaults --------------------------------------------------------------------------------------

    def discover_schema(self, properties: ConnectorConfig) -> None:  # noqa: B027 - optional
        """Determine the schema before `open`, for callers that need the columns for planning.

        Called at most once, with the options for `open`. Its I/O has a time limit. It raises nothing, and
        leaves the schema empty if it cannot determine it. The default does nothing.
        """

    def health_check(self) -> HealthStatus:
        """The current health. Called on a timer, so it returns known facts and sends no request. The default
        is unknown.
        """
        return HealthStatus.UNKNOWN

    def metrics(self) -> ConnectorMetrics:
        """The figures so far. Called on a timer, like `health_check`. The default has no figures."""
        return ConnectorMetrics()

    def data_ready(self) -> threading.Event | None:
        """An event that is set while `poll_batch` has rows or an error; always the same object.

        When `poll_batch` returned None, the consumer waits for the event instead of polling on a timer. The
        connector sets the event, and clears it when `poll_batch` returns None because nothing is left; the
        consumer only waits. The default is None, for sources that must be polled.
        """
        return None

    def as_schema_provider(self) -> SchemaProvider | None:
        """The provider of the schema of each partition; None if there is none."""
        return None

    def as_schema_registry_aware(self) -> SchemaRegistryAware | None:
        """The client that registers schemas in a registry; None if there is none, or no registry is
        configured.
        """
        return None

    def supports_replay(self) -> bool:
        """Whether `restore` returns the rows after the checkpoint again, including those that were returned
        before.

        A source that cannot replay must return False. A crash then loses rows that were returned and not yet
        durable, and a consumer with exactly-once delivery must report at-most-once for this source. The
        default is True.
        """
        return True

    def checkpoint_requested(self) -> threading.Event | None:
        """A flag with which the connector requests a checkpoint at once; always the same object.

        After each `poll_batch` the consumer checks the flag, clears it, then takes a checkpoint and makes it
        durable. If the consumer does this in another order, a request may be lost. The connector only sets
        the flag. The default is None: no requests.
        """
        return None

    def notify_epoch_committed(self, epoch: int) -> None:  # noqa: B027 - optional
        """State that the checkpoint with this `epoch`, and every row before it, is durable: the source may
        remove them.

        Only this method acknowledges anything to the source. Called after the consumer's commit, any number
        of times. A repeated epoch, also after a restart, has no effect. An epoch that was never returned
        raises `ConnectorError`. If the call raises, the consumer logs the error and continues: its commit is
        valid, and a later epoch covers this one. The default does nothing, for sources that keep everything.
        """
