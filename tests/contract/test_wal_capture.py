"""`WalCapture` passes the capture and provisioning suites on a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from typing_extensions import override

from penstock.capture.settings import CaptureSettings
from penstock.capture.wal import WalCapture
from penstock.contracts.provisioning import CaptureProvisioning
from penstock.schema import TableName
from penstock.testing.capture_conformance import ChangeCaptureConformance
from penstock.testing.provisioning_conformance import CaptureProvisioningConformance, ProvisioningHarness
from tests.support.contract.wal_harness import WalHarness
from tests.support.fix_postgres import Database


class TestWalCapture(ChangeCaptureConformance):
    @pytest.fixture
    def harness(self, wal: WalHarness) -> WalHarness:
        return wal


class WalProvisioningHarness(ProvisioningHarness):
    """The read-only role owns nothing and may not create objects."""

    def __init__(self, wal: WalHarness, reader: str) -> None:
        self._wal = wal
        self._database = wal.database
        self._reader = reader
        name = wal.table.name
        self.tables = (
            TableName("public", f"{name}_a"),
            TableName("public", f"{name}_b"),
            TableName("public", f"{name}_c"),
        )
        for table in self.tables:
            self._database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")

    @override
    def provisioning(self, *, privileged: bool) -> CaptureProvisioning:
        settings = self._wal.settings
        address = settings.address if privileged else settings.address.with_parameters({"user": self._reader})
        return WalCapture(CaptureSettings(address, settings.slot, settings.publication, settings.spool))

    @override
    def source_state(self) -> object:
        publications = "SELECT oid::int, xmin::text, * FROM pg_publication ORDER BY 1"
        tables = "SELECT oid::int, xmin::text, prpubid::int, prrelid::int FROM pg_publication_rel ORDER BY 1"
        slots = "SELECT slot_name, confirmed_flush_lsn::text FROM pg_replication_slots ORDER BY 1"
        return [self._database.query(query) for query in (publications, tables, slots)]

    @override
    def run(self, statement: str) -> None:
        self._database.execute(statement)

    @override
    def streamed(self) -> set[TableName]:
        rows = self._database.query(
            "SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname = %s",
            self._wal.settings.publication,
        )
        return {TableName(schema, name) for schema, name in rows}


@pytest.fixture(scope="module")
def reader(shared_database: Database) -> Iterator[str]:
    name = f"{shared_database.name}_reader"
    shared_database.execute(f"CREATE ROLE {name} LOGIN")
    yield name
    shared_database.execute(f"DROP ROLE {name}")


class TestWalProvisioning(CaptureProvisioningConformance):
    @pytest.fixture
    def harness(self, wal: WalHarness, reader: str) -> WalProvisioningHarness:
        return WalProvisioningHarness(wal, reader)
