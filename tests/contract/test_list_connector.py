"""The suite of connectors is tied to no database: the example in `examples/` passes it too."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pytest
from typing_extensions import override

from examples.list_connector import TOPICS, ListConnector, Topic, main
from penstock.contracts.connector import ConnectorConfig, SourceConnector
from penstock.testing.connector_conformance import ConnectorHarness, Row, SourceConnectorConformance

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


class TestListConnector(SourceConnectorConformance):
    @pytest.fixture
    def harness(self) -> ListConnectorHarness:
        return ListConnectorHarness()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert capsys.readouterr().out.endswith("may be forgotten: 2\n")
