"""What a source connector promises: rows as Arrow batches, checkpoints to go on from, and one place where they are acknowledged.

The consumer drives it, in this order: `open`, `restore` if it has a checkpoint, `poll_batch` again and again with `checkpoint` in between,
`notify_epoch_committed` whenever a checkpoint and all rows before it are durable, `close`. `SourceConnectorConformance` in
`penstock.testing` holds an implementation to these rules.

A loop that loses nothing and doubles nothing, where the target keeps rows and checkpoint in one act:

```python
connector.open(config)
if stored is not None:
    connector.restore(stored)
    acknowledge(stored.epoch)  # the last run may not have come to it
while True:
    batch = connector.poll_batch(10_000)
    if batch is not None:
        pending.append(batch)
    if batch is None or flag.is_set():  # where it has a flag
        flag.clear()
        checkpoint = connector.checkpoint()
        target.commit(pending, checkpoint)
        acknowledge(checkpoint.epoch)


def acknowledge(epoch):
    try:
        connector.notify_epoch_committed(epoch)
    except PenstockError:  # the commit stands, and a later epoch covers this one
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
"""What a connector is told, by name, all of it text; so it can stand in any file, statement or option list."""

CHECKPOINT_VERSION = 1
"""Of the JSON of a checkpoint. One with a higher number is refused, not guessed at."""


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """Some rows of one partition, in order; never none."""

    records: pa.RecordBatch
    partition: str
    """Which part of the source they are from: a table, a topic's partition, a file. Order is kept within it, and not promised between."""


@dataclass(frozen=True, slots=True)
class SourceCheckpoint:
    """Where a consumer is. Plain data: it can be stored anywhere, and read by another process, another version, or a person.

    Only its own kind of connector understands what stands in it; the consumer stores it as it is. An empty one is the beginning.
    """

    offsets: Mapping[str, str] = field(default_factory=dict)
    """By partition, or another part of the stream that the connector tells apart."""
    epoch: int = 0
    """Counts how often the connector's place has moved; what `notify_epoch_committed` takes. It goes on from here after `restore`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What else is needed to go on, and what tells that a checkpoint is somebody else's. Never a secret."""

    def to_json(self) -> str:
        """The same text for the same checkpoint, whoever writes it."""
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
            raise CheckpointError("this is not a checkpoint", hint=_ANEW) from error
        if not isinstance(version, int) or not 1 <= version <= CHECKPOINT_VERSION:
            raise CheckpointError(
                f"the checkpoint has version {version!r}; this version of penstock reads up to {CHECKPOINT_VERSION}",
                hint="run the version of penstock that wrote it, or a newer one",
            )
        if not (_is_plain(offsets) and _is_plain(metadata) and isinstance(epoch, int) and epoch >= 0):
            raise CheckpointError("a checkpoint holds texts and a number, and this one does not", hint=_ANEW)
        return cls(offsets, epoch, metadata)


_ANEW = "restore an earlier checkpoint, or start without one, which reads the source from its beginning"


def _is_plain(values: object) -> bool:
    return isinstance(values, dict) and all(isinstance(key, str) and isinstance(value, str) for key, value in values.items())


class Health(Enum):
    """The four states of a connector."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """It works, but somebody should look."""
    UNHEALTHY = "unhealthy"
    """It does not work."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """How a connector is, and why, where it is not well."""

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
    """Counted since `open`. What only goes up ends in `_total`."""

    records_total: int = 0
    """Rows that `poll_batch` has given out."""
    bytes_total: int = 0
    """Their size in memory."""
    errors_total: int = 0
    """What went wrong, be it that the connector got over it."""
    lag: int | None = None
    """How far what has been given out is behind the source, in the source's own measure; None if that cannot be said."""
    custom: Mapping[str, float] = field(default_factory=dict)


class SourceConnector(ABC):
    """Reads a source, in batches, from a checkpoint on.

    `open`, `restore`, `poll_batch`, `checkpoint` and `close` are for one thread at a time. `notify_epoch_committed`, `health_check` and
    `metrics` may come from any thread. Errors are of the tree of `PenstockError`; `ConnectorStateError` says that a call came out of turn.
    """

    # --- required -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, config: ConnectorConfig) -> None:
        """Reach the source and find out the schema.

        Called once, before anything but `discover_schema`. It must not begin to read: where to read from is known only once `restore` has
        been called, or `poll_batch` without it. Raises what stands in the way, such as a config that makes no sense.
        """

    @abstractmethod
    def poll_batch(self, max_records: int) -> SourceBatch | None:
        """The next rows, or None if there are none *now*: ask again later, or when the event of `data_ready` is set.

        Called in a loop. Reading starts with the first call. `max_records`, one or more, is a hint: fewer rows may come although there are
        more. It does not wait for rows. None is never the end of anything; the usual mistake is to take the first one for the end of a
        snapshot. Raises what ended reading, once every row before it has been given out; then the connector is good for `close` alone.
        """

    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns that every batch has, whatever its partition. Empty while it is not known, as before `open`.

        Where partitions differ, a batch has more than these, and `as_schema_provider` knows what.
        """

    @abstractmethod
    def checkpoint(self) -> SourceCheckpoint:
        """The place behind the last row that `poll_batch` gave out: enough to go on there, in another process, after a restart.

        Called as often as one likes, at least whenever the consumer makes its work durable. Cheap, and without any effect: it asks nobody,
        and above all it acknowledges nothing, since nobody knows yet whether it will be stored.
        """

    @abstractmethod
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        """Go on from `checkpoint` instead of from the beginning.

        Called at most once, during recovery, after `open` and before the first `poll_batch`; after that it raises `ConnectorStateError`.
        Raises `CheckpointError` for a checkpoint that is not of this source, and the error that names the hole if what comes after it
        cannot be had any more. It never goes on somewhere else instead.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of everything: connections, threads, locks. Acknowledges nothing. May be called more than once, and without `open`.

        A `with` block calls it at its end.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- with defaults --------------------------------------------------------------------------------------------------

    def discover_schema(self, properties: ConnectorConfig) -> None:  # noqa: B027 - a default, and no duty
        """Find out the schema before `open`, for who must know the columns to plan with them.

        Called at most once, with what `open` will be given. It bounds its I/O by a time limit, raises nothing, and leaves the schema empty
        if it does not find out. By default it does nothing.
        """

    def health_check(self) -> HealthStatus:
        """How it is now. Called on a timer, so it asks nobody: it tells what is known. By default unknown."""
        return HealthStatus.UNKNOWN

    def metrics(self) -> ConnectorMetrics:
        """What has been counted so far. Called on a timer, like `health_check`. By default nothing."""
        return ConnectorMetrics()

    def data_ready(self) -> threading.Event | None:
        """An event that is set while `poll_batch` has something to give, or to raise; always the same one.

        A consumer that got None waits for it, instead of asking on a timer. The connector sets it, and clears it when it answers None with
        nothing left; the consumer only waits. By default None, for sources that must be asked.
        """
        return None

    def as_schema_provider(self) -> SchemaProvider | None:
        """What knows the shape of each partition; None if nothing does."""
        return None

    def as_schema_registry_aware(self) -> SchemaRegistryAware | None:
        """What keeps the shapes in a registry; None if nothing does, or none is configured."""
        return None

    def supports_replay(self) -> bool:
        """Whether `restore` brings back the rows after the checkpoint, also those that were given out before.

        A source that cannot must say so: what was given out and not made durable is then lost with a crash, and a consumer that promises
        exactly once has to say that it is at most once here. By default true.
        """
        return True

    def checkpoint_requested(self) -> threading.Event | None:
        """A flag by which the connector asks for a checkpoint at once; always the same one.

        The consumer looks at it after each `poll_batch`, clears it, and then takes a checkpoint and makes it durable: in this order, or a
        request in between is lost. The connector only ever sets it. By default None: it never asks.
        """
        return None

    def notify_epoch_committed(self, epoch: int) -> None:  # noqa: B027 - a default, and no duty
        """The checkpoint with this `epoch`, and every row before it, is durable: the source may forget them.

        This is the only place where anything is acknowledged to the source. Called after the consumer's commit, as often as it likes, also
        again for an epoch that was told before, after a restart too: that does nothing. An epoch that was never given out is refused with
        `ConnectorError`. If it raises, the consumer logs that and goes on: its commit stands, and a later epoch covers this one.
        By default nothing, for sources that keep everything anyway.
        """
