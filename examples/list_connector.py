"""The smallest implementation of the source connector contract: rows in a list, and the number of rows that
were acknowledged.

`Topic` represents the source and its durable state. Run it to see batches, or use it as a template for your
own connector: `tests/contract/test_list_connector.py` runs `SourceConnectorConformance` against it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

import pyarrow as pa
from typing_extensions import override

from penstock.contracts.connector import (
    ConnectorConfig,
    ConnectorMetrics,
    HealthStatus,
    SourceBatch,
    SourceCheckpoint,
    SourceConnector,
)
from penstock.contracts.schemas import SchemaProvider
from penstock.errors import CheckpointError, ConnectorError, ConnectorStateError


class Topic:
    """Rows in order, each with its schema; the listeners for new rows; and the number of
    acknowledged rows.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.rows: list[tuple[pa.Schema, Mapping[str, object]]] = []
        self.schema = pa.schema([("id", pa.int64()), ("note", pa.string())])
        self.waiting: set[threading.Event] = set()
        self.forgettable = 0

    def add(self, *rows: Mapping[str, object]) -> None:
        with self.lock:
            self.rows += [(self.schema, row) for row in rows]
            for event in self.waiting:
                event.set()


TOPICS: Final[dict[str, Topic]] = {}


class ListConnector(SourceConnector, SchemaProvider):
    """Reads one topic. A position is a number of rows, and so is an epoch."""

    def __init__(self) -> None:
        self._topic: Topic | None = None
        self._at = 0
        self._is_reading = self._is_closed = False
        self._schema = pa.schema([])
        self._ready = threading.Event()
        self._wants_checkpoint = threading.Event()
        self._rows_total = self._bytes_total = 0

    # --- required -------------------------------------------------------------------------------------------

    @override
    def open(self, config: ConnectorConfig) -> None:
        if self._topic is not None or self._is_closed:
            raise ConnectorStateError(f"the connector was {'closed' if self._is_closed else 'opened'} before")
        self._topic = _topic(config)
        self._schema = self._topic.schema

    @override
    def poll_batch(self, max_records: int) -> SourceBatch | None:
        topic = self._opened()
        self._is_reading = True
        with topic.lock:
            topic.waiting.add(self._ready)
            found = topic.rows[self._at : self._at + max_records]
            if not found:
                self._ready.clear()  # under the lock, so that no row is added between the check and this
                return None
        shape = found[0][0]
        rows = [row for schema, row in found if schema is shape]  # up to the first row with another schema
        if self._at and shape != self._schema:
            self._wants_checkpoint.set()
        self._schema = shape
        records = pa.RecordBatch.from_pylist([dict(row) for row in rows], shape)
        self._at += len(rows)
        self._rows_total += len(rows)
        self._bytes_total += records.nbytes
        return SourceBatch(records, topic.name)

    @override
    def schema(self) -> pa.Schema:
        return self._schema

    @override
    def checkpoint(self) -> SourceCheckpoint:
        return (
            SourceCheckpoint({self._topic.name: str(self._at)}, self._at)
            if self._topic is not None
            else SourceCheckpoint()
        )

    @override
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        topic = self._opened()
        if self._is_reading:
            raise ConnectorStateError("reading has started, and a checkpoint comes too late")
        text = (
            checkpoint.offsets.get(topic.name, "") if checkpoint.offsets else "0"
        )  # an empty checkpoint is the beginning
        if not text.isdecimal():
            raise CheckpointError(f"the checkpoint is not one of topic {topic.name}")
        self._at = int(text)

    @override
    def close(self) -> None:
        self._is_closed = True
        if self._topic is not None:
            with self._topic.lock:
                self._topic.waiting.discard(self._ready)

    # --- what it can do beyond that -------------------------------------------------------------------------

    @override
    def discover_schema(self, properties: ConnectorConfig) -> None:
        try:
            self._schema = _topic(properties).schema
        except ConnectorError:
            self._schema = pa.schema([])

    @override
    def health_check(self) -> HealthStatus:
        return HealthStatus.HEALTHY if self._is_reading and not self._is_closed else HealthStatus.UNKNOWN

    @override
    def metrics(self) -> ConnectorMetrics:
        lag = len(self._topic.rows) - self._at if self._topic is not None else None
        return ConnectorMetrics(self._rows_total, self._bytes_total, lag=lag)

    @override
    def data_ready(self) -> threading.Event | None:
        return self._ready

    @override
    def checkpoint_requested(self) -> threading.Event | None:
        return self._wants_checkpoint

    @override
    def as_schema_provider(self) -> SchemaProvider | None:
        return self

    @override
    def notify_epoch_committed(self, epoch: int) -> None:
        topic = self._opened()
        if epoch > self._at:
            raise ConnectorError(f"epoch {epoch} has not been given out; the last one is {self._at}")
        with topic.lock:
            topic.forgettable = max(topic.forgettable, epoch)

    # --- SchemaProvider -------------------------------------------------------------------------------------

    @override
    def partitions(self) -> tuple[str, ...]:
        return (self._opened().name,)

    @override
    def schema_of(self, partition: str, offset: str | None = None) -> pa.Schema | None:
        topic = self._opened()
        if partition != topic.name:
            return None
        return topic.schema if offset is None or offset == "0" else topic.rows[int(offset) - 1][0]

    def _opened(self) -> Topic:
        if self._topic is None or self._is_closed:
            raise ConnectorStateError("the connector is not open")
        return self._topic


def _topic(config: ConnectorConfig) -> Topic:
    name = config.get("topic", "")
    if name not in TOPICS:
        raise ConnectorError(f"there is no topic {name!r}", hint=f"use one of: {', '.join(TOPICS)}")
    return TOPICS[name]


def main() -> None:
    topic = TOPICS["greetings"] = Topic("greetings")
    topic.add({"id": 1, "note": "hello"}, {"id": 2, "note": "good bye"})
    connector = ListConnector()
    connector.open({"topic": "greetings"})
    while (batch := connector.poll_batch(1)) is not None:
        print(batch.partition, batch.records.to_pylist())
        checkpoint = (
            connector.checkpoint()
        )  # here a real consumer makes rows and checkpoint durable, in one transaction
        connector.notify_epoch_committed(checkpoint.epoch)
    connector.close()
    print("may be forgotten:", topic.forgettable)


if __name__ == "__main__":
    main()
