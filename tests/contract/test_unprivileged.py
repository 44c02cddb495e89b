"""A capture role without privileges: the error prints statements that an administrator can paste to fix
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from penstock.capture.trigger.capture import TriggerCapture
from penstock.capture.wal import WalCapture
from penstock.contracts.capture import ChangeCapture
from penstock.errors import ChangeTableMissingError, PenstockError, PublicationError
from penstock.postgres.connection import SourceAddress
from penstock.testing.capture_conformance import upsert
from penstock.testing.streams import check_same, take
from tests.support.contract.tables_harness import TablesHarness
from tests.support.contract.trigger_harness import TriggerHarness, trigger_harness
from tests.support.contract.wal_harness import WalHarness, wal_harness
from tests.support.fix_postgres import Database
from tests.support.fix_roles import Roles


@pytest.fixture
def owner(database: Database, roles: Roles) -> str:
    """Owns the tables, and may create things in the database."""
    name = roles.create("owner")
    database.execute(f"GRANT CREATE ON DATABASE {database.name} TO {name}")
    return name


@pytest.fixture
def wal(database: Database, owner: str, tmp_path: Path) -> Iterator[WalHarness]:
    with wal_harness(database, tmp_path) as harness:
        give(harness, owner)
        yield harness


@pytest.fixture
def trigger(database: Database, owner: str, tmp_path: Path) -> Iterator[TriggerHarness]:
    with trigger_harness(database, tmp_path) as harness:
        give(harness, owner)
        yield harness


def give(harness: TablesHarness, owner: str) -> None:
    for table in (harness.table, harness.other):
        harness.database.execute(f"ALTER TABLE {table} OWNER TO {owner}")


@pytest.mark.parametrize("manage", [True, False])
def test_error_for_a_role_that_may_not_publish_names_the_statements_for_the_owner(
    wal: WalHarness, roles: Roles, owner: str, caplog: pytest.LogCaptureFixture, *, manage: bool
) -> None:
    plain = roles.create("plain", "REPLICATION")
    settings = replace(wal.settings, address=roles.address(plain))
    capture = WalCapture(settings).with_publication_management({wal.table, wal.other}, manage)
    check_told(wal, capture, PublicationError, roles.address(owner), caplog)
    assert capture.inspect_coverage({wal.table, wal.other}).satisfied


@pytest.mark.parametrize("manage", [True, False])
def test_error_for_a_role_that_may_not_create_triggers_names_the_statements_for_the_owner(
    trigger: TriggerHarness, roles: Roles, owner: str, caplog: pytest.LogCaptureFixture, *, manage: bool
) -> None:
    plain = roles.create("plain")
    settings = replace(trigger.settings, address=roles.address(plain).trusting([owner]))
    capture = TriggerCapture(settings).with_trigger_management({trigger.table, trigger.other}, manage)
    check_told(trigger, capture, ChangeTableMissingError, roles.address(owner), caplog)
    assert capture.inspect_coverage({trigger.table, trigger.other}).satisfied


def check_told(
    harness: TablesHarness,
    capture: ChangeCapture,
    refusal: type[PenstockError],
    owner: SourceAddress,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing exists: the start fails and logs statements, which the owner runs. Then it starts without
    errors.
    """
    with pytest.raises(refusal) as raised:
        capture.live()
    (said,) = [
        record.getMessage() for record in caplog.records if "every required table" in record.getMessage()
    ]
    assert "who owns" in said, "the obstacle is named too"
    assert said.endswith(f"; {raised.value.hint}"), "no hint to manage what is managed already"
    assert "CREATE PUBLICATION" not in said.partition("\n-- blocked by: ")[2], "a statement is printed once"
    assert "CREATE TRIGGER" not in said.partition("\n-- blocked by: ")[2]
    with psycopg.connect(owner.conninfo("test")) as connection:
        connection.execute(said.partition("; run: ")[2].encode())
    caplog.clear()
    with closing(capture.live()) as stream:
        harness.commit(upsert(harness.other, 1, "x"))
        check_same(
            take(stream, 1, harness.deadline_seconds),
            [upsert(harness.other, 1, "x")],
            "the missing table is streamed",
        )
    assert "every required table" not in caplog.text


def test_publication_that_leaves_something_out_causes_a_warning_with_the_fix(
    wal: WalHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no gap to be closed: all tables are published."""
    wal.database.execute(
        f"CREATE PUBLICATION {wal.settings.publication} FOR TABLE {wal.table} WITH (publish = 'insert, "
        "update')"
    )
    WalCapture(wal.settings).with_publication_management({wal.table}, manage=False).live().close()
    (said,) = [
        record.getMessage() for record in caplog.records if "every required table" in record.getMessage()
    ]
    reason, _, remedy = said.partition("; blocked by: ")[2].partition(" (ALTER")
    assert reason.endswith("leaves out delete and truncate")
    wal.database.execute(f"ALTER{remedy.removesuffix(')')}")
    assert wal.capture().inspect_coverage({wal.table}).satisfied
