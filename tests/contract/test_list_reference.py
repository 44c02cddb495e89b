"""The suite is tied to no database: the example in `examples/` passes it too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from typing_extensions import override

from examples.list_reference import Ledger, ListReference, main
from penstock.contracts.capture import Event
from penstock.contracts.reference import ReferenceTableSource
from penstock.testing.reference_conformance import ReferenceTableConformance
from penstock.testing.reference_harness import ReferenceHarness


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


class TestListReference(ReferenceTableConformance):
    @pytest.fixture
    def harness(self) -> LedgerHarness:
        return LedgerHarness()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert '"version":"2"' in capsys.readouterr().out.splitlines()[-1]
