"""`TriggerCapture` passes the capture and provisioning suites on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from typing_extensions import override

from penstock.capture.trigger.capture import TriggerCapture
from penstock.contracts.provisioning import CaptureProvisioning
from penstock.schema import TableName
from penstock.testing.capture_conformance import ChangeCaptureConformance
from penstock.testing.provisioning_conformance import CaptureProvisioningConformance, ProvisioningHarness
from tests.support.contract.trigger_harness import TriggerHarness
from tests.support.fix_postgres import Database


class TestTriggerCapture(ChangeCaptureConformance):
    @pytest.fixture
    def harness(self, trigger: TriggerHarness) -> TriggerHarness:
        return trigger


class TriggerProvisioningHarness(ProvisioningHarness):
    """The read-only role owns nothing and may not create objects."""

    def __init__(self, trigger: TriggerHarness, reader: str) -> None:
        self._trigger = trigger
        self._database = trigger.database
        self._reader = reader
        name = trigger.table.name
        self.tables = (
            TableName("public", f"{name}_a"),
            TableName("public", f"{name}_b"),
            TableName("public", f"{name}_c"),
        )
        for table in self.tables:
            self._database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")

    @override
    def provisioning(self, *, privileged: bool) -> CaptureProvisioning:
        settings = self._trigger.settings
        address = settings.address if privileged else settings.address.with_parameters({"user": self._reader})
        return TriggerCapture(replace(settings, address=address))

    @override
    def source_state(self) -> object:
        triggers = (
            "SELECT oid::int, xmin::text, tgrelid::int, tgname, tgenabled::text FROM pg_trigger ORDER BY 1"
        )
        functions = "SELECT oid::int, xmin::text FROM pg_proc WHERE oid >= 16384 ORDER BY 1"
        schemas = "SELECT oid::int, xmin::text, nspacl::text FROM pg_namespace ORDER BY 1"
        relations = "SELECT oid::int, relname, relacl::text FROM pg_class WHERE oid >= 16384 ORDER BY 1"
        return [self._database.query(query) for query in (triggers, functions, schemas, relations)]

    @override
    def run(self, statement: str) -> None:
        self._database.execute(statement)

    @override
    def streamed(self) -> set[TableName]:
        rows = self._database.query(
            "SELECT relnamespace::regnamespace::text, relname FROM pg_trigger t JOIN pg_class c "
            "ON c.oid = t.tgrelid "
            "WHERE t.tgname = %s AND t.tgenabled = 'A'",
            f"!{self._trigger.settings.name}",
        )
        return {TableName(schema, name) for schema, name in rows}


@pytest.fixture(scope="module")
def reader(shared_database: Database) -> Iterator[str]:
    name = f"{shared_database.name}_reader"
    shared_database.execute(f"CREATE ROLE {name} LOGIN")
    yield name
    shared_database.execute(f"DROP OWNED BY {name}")
    shared_database.execute(f"DROP ROLE {name}")


class TestTriggerProvisioning(CaptureProvisioningConformance):
    @pytest.fixture
    def harness(self, trigger: TriggerHarness, reader: str) -> TriggerProvisioningHarness:
        return TriggerProvisioningHarness(trigger, reader)
