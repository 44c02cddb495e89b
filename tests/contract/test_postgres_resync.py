"""The swap of a resync into Postgres when the connection is cut after the server has committed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from penstock.pipeline.error_policy import TableRetries
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from tests.support.contract.postgres_harness import PostgresHarness
from tests.support.contract.sink_harness import ITEMS
from tests.support.fix_postgres import Database
from tests.support.fix_proxy import ProxyFactory, TcpProxy
from tests.support.pipeline.epochs import open_epochs
from tests.support.sinks.source import Value


class Resync:
    """The table streams, and has an outdated row. Its shadow is copied and ready for the swap."""

    def __init__(self, root: Path, database: Database, proxy: ProxyFactory) -> None:
        known = conninfo_to_dict(database.dsn)
        self.between: TcpProxy = proxy(str(known["host"]), int(str(known["port"])))
        self.harness = PostgresHarness(root, database)
        self.harness.sink.close()
        dsn = make_conninfo(database.dsn, host=self.between.host, port=self.between.port)
        self.harness.address = SourceAddress.parse(dsn)
        self.harness.sink = self.sink = self.harness.open()
        self.done: list[tuple[TableName, bool]] = []
        self.now = 0.0
        (root / "lake").mkdir()
        epochs = open_epochs(
            self.sink,
            root,
            pipeline="shop",
            on_done=lambda name, failure: self.done.append((name, failure is None)),
        )
        self.applier, self.resyncs = epochs.applier, epochs.resyncs
        self.resyncs._attempts = TableRetries(lambda: self.now)

    def prepare(self) -> None:
        harness = self.harness
        harness.copy()
        self.harness.source.update(
            self.harness.at(3), {"note": Value("changed while the table was resynced")}
        )
        self.end = harness.follow()
        target = harness.target()
        harness.database.execute("UPDATE copy_public.items SET note = 'differs from the source' WHERE id = 1")
        self.applier.tables.start(
            {ITEMS: target}, {ITEMS: TableStatus(TableState.STREAMING, target.applied, target.applied)}
        )
        self.shadow = self.sink.shadow("c0ffee")
        self.resyncs.begin(ITEMS, self.shadow, harness.fence)
        harness.sink = self.shadow
        harness.copy()
        harness.apply(harness.fence, self.end)
        copied = harness.target()
        harness.sink = self.sink
        self.resyncs.add_copied(copied)

    def epoch(self) -> None:
        self.harness.source.update(
            self.harness.at(2), {"note": Value(f"note at {self.harness.source.position}")}
        )
        self.applier.apply(self.harness.commit())

    def swap(self) -> None:
        """An epoch without changes, whose first transaction is the swap."""
        self.applier.apply(self.end)

    @property
    def is_right(self) -> bool:
        is_level = (
            self.harness.target().applied
            == self.applier.position
            == self.applier.tables.statuses[ITEMS].applied
        )
        return is_level and self.harness.rows() == self.harness.source.sorted_rows()


@pytest.fixture
def resync(shared_database: Database, tmp_path: Path, proxy: ProxyFactory) -> Iterator[Resync]:
    shared_database.execute("DROP SCHEMA IF EXISTS penstock, copy_public, mirror CASCADE")
    made = Resync(tmp_path, shared_database, proxy)
    made.prepare()
    yield made
    made.between.accept()
    made.sink.close()


def test_a_swap_whose_answer_was_lost_is_recognised_at_once(resync: Resync) -> None:
    resync.between.lose_answer_to(b"COMMIT")
    resync.swap()
    assert resync.done == [(ITEMS, True)]
    assert resync.is_right
    resync.epoch()
    assert resync.is_right


def test_a_swap_whose_answer_was_lost_is_recognised_by_the_next_attempt_if_the_server_is_away(
    resync: Resync,
) -> None:
    resync.between.lose_answer_to(b"COMMIT", then_refuse=True)
    resync.swap()
    assert resync.done == [], "nothing is known of the swap"
    resync.between.accept()
    resync.now += 3600.0
    resync.epoch()
    assert resync.done == [(ITEMS, True)]
    assert resync.applier.tables.statuses[ITEMS].state is TableState.STREAMING
    assert resync.is_right


def test_a_swap_that_the_server_did_not_commit_is_tried_again(resync: Resync) -> None:
    with resync.harness.dying():
        resync.epoch()
    assert resync.done == []
    resync.now += 3600.0
    resync.epoch()
    assert resync.done == [(ITEMS, True)]
    assert resync.is_right
