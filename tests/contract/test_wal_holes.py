"""P08: changes made while the publication or a table of it was missing are in no log; the capture refuses to
continue.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import WalCapture
from penstock.capture.settings import CaptureLimits
from penstock.capture.slot_capture import SpoolCapture
from penstock.contracts.capture import ChangeStream
from penstock.errors import PenstockError, PublicationError, TableGapError
from penstock.position import Position
from penstock.records.source import PostgresRecordSource
from penstock.testing.capture_conformance import upsert
from penstock.testing.streams import Background, check_same, take
from tests.support.contract.wal_harness import WalHarness, wal_harness
from tests.support.fix_postgres import Database

DROPPED = ("DROP PUBLICATION {publication}", "CREATE PUBLICATION {publication} FOR TABLE {table}, {other}")
LEFT = (
    "ALTER PUBLICATION {publication} DROP TABLE {table}",
    "ALTER PUBLICATION {publication} ADD TABLE {table}",
)


@pytest.fixture
def wal(database: Database, tmp_path: Path) -> Iterator[WalHarness]:
    with wal_harness(database, tmp_path) as harness:
        yield harness


def alter(wal: WalHarness, statement: str) -> None:
    wal.database.execute(
        statement.format(publication=wal.settings.publication, table=wal.table, other=wal.other)
    )


def begin(wal: WalHarness, capture: WalCapture) -> Position:
    """Capture and confirm one row; returns the slot's position."""
    with closing(capture.live()) as stream:
        wal.commit(upsert(wal.table, 1, "x"))
        (change,) = take(stream, 1, wal.deadline_seconds)
        change.ack.confirm()
    return wal.confirmed


def follow_hint(wal: WalHarness, error: PenstockError) -> None:
    """Apply the fix as far as a program can: the statement for the slot, then the removal of the spool."""
    statement = f"SELECT pg_drop_replication_slot('{wal.settings.slot}');"
    assert statement in (error.hint or "")
    wal.database.execute(statement)
    shutil.rmtree(wal.settings.spool)


def error_of(stream: ChangeStream, wal: WalHarness) -> PenstockError:
    with pytest.raises(PenstockError) as raised:
        Background(lambda: [change.ack.confirm() for change in stream]).result(
            wal.deadline_seconds, "an error"
        )
    return raised.value


@pytest.mark.versions(17, 18)
@pytest.mark.parametrize(("leave", "join"), [DROPPED, LEFT], ids=["publication", "table"])
@pytest.mark.parametrize("manage", [True, False], ids=["managed", "given"])
def test_P08_a_publication_dropped_and_recreated_while_no_capture_runs(
    wal: WalHarness, leave: str, join: str, manage: bool
) -> None:
    alter(wal, DROPPED[1])
    capture = wal.capture() if manage else WalCapture(wal.settings)
    confirmed = begin(wal, capture)
    alter(wal, leave)
    wal.commit(upsert(wal.table, 2, "lost"))
    alter(wal, join)
    wal.commit(upsert(wal.table, 3, "y"))
    with pytest.raises(TableGapError):
        capture.live()
    with pytest.raises(
        TableGapError, match=rf"{wal.table} was taken out of the publication and put in again"
    ) as raised:
        capture.live()
    assert wal.confirmed == confirmed
    follow_hint(wal, raised.value)
    with closing(capture.live()) as stream:
        wal.commit(upsert(wal.table, 4, "z"))
        check_same(take(stream, 1, wal.deadline_seconds), [upsert(wal.table, 4, "z")], "as the hint says")


@pytest.mark.versions(17, 18)
def test_P08_a_missing_publication_is_refused_before_the_first_row(wal: WalHarness) -> None:
    alter(wal, DROPPED[1])
    confirmed = begin(wal, WalCapture(wal.settings))
    alter(wal, DROPPED[0])
    wal.commit(upsert(wal.table, 2, "lost"))
    with pytest.raises(PublicationError, match="does not exist") as raised:
        WalCapture(wal.settings).live()
    assert f'CREATE PUBLICATION "{wal.settings.publication}"' in (raised.value.hint or "")
    engine = SpoolCapture(wal.settings)
    engine.start()
    with pytest.raises(PublicationError, match="does not exist"):
        engine.wait_until(Position.ZERO, wal.deadline_seconds)
    engine.stop()
    assert wal.confirmed == confirmed
    follow_hint(wal, raised.value)


@pytest.mark.versions(14, 17)
def test_P08_error_of_a_server_that_cannot_read_past_the_hole_names_the_fix(wal: WalHarness) -> None:
    """No membership is recorded, as with earlier versions."""
    alter(wal, DROPPED[1])
    confirmed = begin(wal, wal.capture())
    shutil.rmtree(wal.settings.spool / "tables")
    alter(wal, DROPPED[0])
    wal.commit(upsert(wal.table, 2, "lost"))
    alter(wal, DROPPED[1])
    with closing(wal.capture().live()) as stream:
        error = error_of(stream, wal)
    assert isinstance(error, PublicationError)
    assert "did not exist when the next change was made" in error.message
    assert wal.confirmed == confirmed
    follow_hint(wal, error)
    begin(wal, wal.capture())


@pytest.mark.versions(17, 18)
@pytest.mark.parametrize(
    ("leave", "join"),
    [DROPPED, LEFT, (DROPPED[0], None), (LEFT[0], None)],
    ids=["both", "left", "gone", "out"],
)
def test_P08_unpublishing_a_table_ends_a_running_stream(
    wal: WalHarness, leave: str, join: str | None
) -> None:
    alter(wal, DROPPED[1])
    settings = replace(wal.settings, limits=CaptureLimits(quiet_seconds=0.1, watch_seconds=0.05))
    capture = WalCapture(settings).with_publication_management({wal.table}, manage=False)
    with closing(capture.live()) as stream:
        wal.commit(upsert(wal.table, 1, "x"))
        take(stream, 1, wal.deadline_seconds)
        # In one transaction: between two, the check may see that the publication is missing, which is another
        # error.
        alter(wal, leave if join is None else f"{leave}; {join}")
        error = error_of(stream, wal)
    expected = PublicationError if leave == DROPPED[0] and join is None else TableGapError
    assert type(error) is expected, str(error)
    assert "pg_drop_replication_slot" in (error.hint or "")
    with pytest.raises((PublicationError, TableGapError)):
        capture.live()


def test_P08_a_table_that_leaves_a_capture_of_all_published_tables_is_reported_once(
    wal: WalHarness, caplog: pytest.LogCaptureFixture
) -> None:
    alter(wal, DROPPED[1])
    begin(wal, WalCapture(wal.settings))
    alter(wal, LEFT[0])
    with closing(WalCapture(wal.settings).live()) as stream:
        wal.commit(upsert(wal.other, 2, "y"))
        check_same(take(stream, 1, wal.deadline_seconds), [upsert(wal.other, 2, "y")], "the others go on")
    assert [record.message for record in caplog.records].count("table is no longer in the publication") == 1
    alter(wal, LEFT[1])
    with pytest.raises(TableGapError, match="put in again"):
        WalCapture(wal.settings).live()


def test_P08_a_table_that_was_always_published_is_no_gap_after_a_rename(
    wal: WalHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """A table that replaces a dropped one is no gap either, if every new table is published."""
    alter(wal, "CREATE PUBLICATION {publication} FOR ALL TABLES")
    begin(wal, WalCapture(wal.settings))
    alter(
        wal,
        "ALTER TABLE {table} RENAME TO renamed; CREATE TABLE {table} (LIKE renamed INCLUDING ALL); "
        "DROP TABLE {other}",
    )
    wal.commit(upsert(wal.table, 2, "y"))
    with closing(WalCapture(wal.settings).live()) as stream:
        check_same(take(stream, 1, wal.deadline_seconds), [upsert(wal.table, 2, "y")], "nothing is missing")
    alter(wal, "CREATE TABLE {other} (LIKE {table} INCLUDING ALL)")
    with closing(WalCapture(wal.settings).live()):
        pass
    assert "table is no longer in the publication" not in caplog.text


def test_P08_tables_that_swap_names_are_identified_by_oid(wal: WalHarness) -> None:
    """As in an online migration: the new table takes the name of the old one, which is dropped."""
    alter(wal, DROPPED[1])
    begin(wal, WalCapture(wal.settings))
    alter(wal, "ALTER TABLE {table} RENAME TO former; ALTER TABLE {other} RENAME TO " + wal.table.name)
    with closing(WalCapture(wal.settings).live()):
        pass
    alter(wal, "DROP TABLE former")
    wal.commit(upsert(wal.table, 2, "y"))
    with closing(WalCapture(wal.settings).live()) as stream:
        check_same(take(stream, 1, wal.deadline_seconds), [upsert(wal.table, 2, "y")], "nothing is missing")
    for statement in LEFT:
        alter(wal, statement)
    with pytest.raises(TableGapError, match="put in again"):
        WalCapture(wal.settings).live()


def test_P08_a_record_source_looks_after_its_own_table_alone(wal: WalHarness) -> None:
    alter(wal, DROPPED[1])
    config = {
        "url": wal.database.dsn,
        "table": str(wal.table),
        "slot": wal.settings.slot,
        "publication": wal.settings.publication,
        "spool": str(wal.settings.spool),
        "snapshot": "never",
        "quietSeconds": "0.1",
    }

    def opened() -> PostgresRecordSource:
        source = PostgresRecordSource()
        source.open(config)
        return source

    source = opened()
    wal.commit(upsert(wal.table, 1, "x"))
    at = source.read(None).position
    source.teardown()
    for statement in LEFT:
        alter(wal, statement.replace("{table}", "{other}"))
    source = opened()
    wal.commit(upsert(wal.table, 2, "y"))
    at = source.read(at).position
    source.teardown()
    alter(wal, LEFT[0])
    wal.commit(upsert(wal.table, 3, "lost"))
    with pytest.raises(TableGapError, match="taken out of the publication"):
        opened()
