"""What the rules of `SourceConnector` are tested with: the source behind a connector, and steps each of which has a deadline."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa

from penstock.contracts.connector import ConnectorConfig, SourceBatch, SourceCheckpoint, SourceConnector
from penstock.errors import ConnectorError
from penstock.testing.streams import wait_for

Row = tuple[int, str | None]
"""`id` and `note`."""

MAX_RECORDS = 1000


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
    with harness.connector() as connector:
        connector.open(harness.config())
        if stored is not None:
            connector.restore(stored)
        yield connector


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
