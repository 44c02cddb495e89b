"""Harnesses of the contract suites for in-memory implementations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from typing_extensions import override

from examples.list_capture import Journal, ListCapture
from examples.list_connector import TOPICS, ListConnector, Topic
from examples.list_provisioning import ListProvisioning, Register
from examples.list_records import ListIterator, ListRecordSource, ListSnapshotter, Log
from examples.list_reference import Ledger, ListReference
from penstock.contracts.capture import ChangeCapture, Event
from penstock.contracts.connector import ConnectorConfig, SourceConnector
from penstock.contracts.provisioning import CaptureProvisioning
from penstock.contracts.records import CdcIterator, RecordSource, Snapshotter
from penstock.contracts.reference import ReferenceTableSource
from penstock.schema import TableName
from penstock.testing.capture_conformance import CaptureHarness, upsert
from penstock.testing.connector_conformance import ConnectorHarness, Row
from penstock.testing.provisioning_conformance import ProvisioningHarness
from penstock.testing.records_conformance import (
    Config,
    IteratorHarness,
    RecordHarness,
    SnapshotterHarness,
)
from penstock.testing.reference_conformance import ReferenceHarness


class ListHarness(CaptureHarness):
    deadline_seconds = 5.0

    def __init__(self) -> None:
        self.journal = Journal()

    @override
    def capture(self) -> ChangeCapture:
        return ListCapture(self.journal, frozenset({self.table, self.other}))

    @override
    def commit(self, *events: Event) -> None:
        self.journal.commit(*events)

    @override
    def commit_elsewhere(self) -> None:
        self.journal.commit(upsert(TableName("public", "elsewhere"), 1, "x"))


_numbers = itertools.count(1)


class ListConnectorHarness(ConnectorHarness):
    deadline_seconds = 5.0

    def __init__(self) -> None:
        name = f"topic {next(_numbers)}"
        self.topic = TOPICS[name] = Topic(name)

    @override
    def connector(self) -> SourceConnector:
        return ListConnector()

    @override
    def config(self) -> ConnectorConfig:
        return {"topic": self.topic.name}

    @override
    def unreachable(self) -> ConnectorConfig:
        return {"topic": "nowhere"}

    @override
    def add(self, *rows: Row) -> None:
        self.topic.add(*({"id": each, "note": note} for each, note in rows))

    @override
    def change_shape(self) -> None:
        self.topic.schema = self.topic.schema.append(pa.field("extra", pa.bool_()))

    @override
    def acknowledged(self) -> object:
        return self.topic.forgettable

    @override
    def open_resources(self) -> object:
        return len(self.topic.waiting)


class RegisterHarness(ProvisioningHarness):
    def __init__(self) -> None:
        self.register = Register(*self.tables)

    @override
    def provisioning(self, *, privileged: bool) -> CaptureProvisioning:
        return ListProvisioning(self.register, may_add=privileged)

    @override
    def source_state(self) -> object:
        return set(self.register.streamed)

    @override
    def run(self, statement: str) -> None:
        self.register.run(statement)

    @override
    def streamed(self) -> set[TableName]:
        return set(self.register.streamed)


class ListSnapshotterHarness(SnapshotterHarness):
    deadline_seconds = 5.0

    def __init__(self) -> None:
        self.log = Log()

    @override
    def commit(self, *events: Event) -> None:
        self.log.commit(*events)

    @override
    def snapshotter(self) -> Snapshotter:
        return ListSnapshotter(self.log, self.table)


class ListIteratorHarness(IteratorHarness):
    deadline_seconds = 5.0
    capacity = 5

    @override
    def iterator(self) -> CdcIterator:
        return ListIterator(self.capacity)


class ListRecordHarness(RecordHarness):
    deadline_seconds = 5.0

    def __init__(self) -> None:
        self.log = Log()

    @override
    def commit(self, *events: Event) -> None:
        self.log.commit(*events)

    @override
    def source(self) -> RecordSource:
        return ListRecordSource({"here": self.log})

    @override
    def config(self) -> Config:
        return {"url": "list:here", "table": str(self.table)}

    @override
    def config_without_table(self) -> Config:
        return {"url": "list:here"}

    @override
    def config_without_address(self) -> Config:
        return {"url": "somewhere", "table": str(self.table)}

    @override
    def config_of_nobody(self) -> Config:
        return {"url": "list:nowhere", "table": str(self.table)}


class LedgerHarness(ReferenceHarness):
    deadline_seconds = 5.0
    many_rows = 35
    breaks = True

    def __init__(self) -> None:
        self.ledger = Ledger()

    @override
    def source(self) -> ReferenceTableSource:
        return ListReference(self.ledger)

    @override
    @contextmanager
    def broken(self) -> Iterator[None]:
        self.ledger.is_shut = True
        yield
        self.ledger.is_shut = False

    @override
    def commit(self, *events: Event) -> None:
        self.ledger.commit(*events)
