"""A standby, its promotion, and which slots the capture accepts afterwards (L10, L11).

One cluster serves all tests: a primary and a standby, and three databases with a slot each. `kept` is
captured up to a position before the standby falls behind; `ahead` is captured further, so that it holds
changes that the standby never gets; `plain` has a slot that is not synchronised to standbys. Then the primary
is killed.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pytest

from penstock.errors import PenstockError, SlotFailoverError, StandbyError, TimelineChangedError
from penstock.position import Position
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.consistent_read import inspect_system
from penstock.spool.ownership import ensure_identity, load_identity
from penstock.spool.retention import release
from penstock.testing.embedded import EmbeddedPostgres
from tests.support.fix_postgres import Database, server_directory
from tests.support.slot.source import COPY_AGAIN, Source
from tests.support.waiting import DEADLINE_SECONDS, wait_for

SURVIVES = (
    f"{COPY_AGAIN}; with source.failover: true and sync_replication_slots on the standby (Postgres 17 and "
    "later), the slot "
    "survives a promotion"
)


@dataclass
class Cluster:
    """After the promotion: every source points at the server that was the standby."""

    kept: Source
    ahead: Source
    plain: Source
    on_standby: PenstockError
    """The error of a capture from the standby, before the promotion."""
    polled: PenstockError
    """The error of a polling capture from the standby."""
    switch: Position


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with server_directory() as directory:
        primary = EmbeddedPostgres(directory / "primary", 18, fsync=False)
        primary.start()
        standby: EmbeddedPostgres | None = None
        try:
            standby = start_standby(primary, directory / "standby")
            made = promoted(primary, standby, directory)
            yield made
            for source in (made.kept, made.ahead, made.plain):
                source.database.close()
        finally:
            primary.stop("immediate")
            if standby is not None:
                standby.stop("immediate")


def start_standby(primary: EmbeddedPostgres, data_dir: Path) -> EmbeddedPostgres:
    run(primary, "SELECT pg_create_physical_replication_slot('standby')")
    primary.stop()
    subprocess.run(["cp", "-a", str(primary.data_dir), str(data_dir)], check=True)
    for slot in (data_dir / "pg_replslot").iterdir():
        shutil.rmtree(slot)
    (data_dir / "standby.signal").touch()
    primary.start()
    settings = {
        "primary_conninfo": f"host=127.0.0.1 port={primary.port} user=postgres dbname=postgres",
        "primary_slot_name": "standby",
        "hot_standby_feedback": "on",
    }
    standby = EmbeddedPostgres(data_dir, primary.version, settings, fsync=False)
    standby.start()
    return standby


def promoted(primary: EmbeddedPostgres, standby: EmbeddedPostgres, directory: Path) -> Cluster:
    sources = []
    for name in ("kept", "ahead", "plain"):
        run(primary, f"CREATE DATABASE {name}")
        source = Source(
            Database(name, primary.dsn(name)), directory / f"spool-{name}", failover=name != "plain"
        )
        release(source.spool, "pipeline", source.capture_all(1, 10))
        sources.append(source)
    kept, ahead, plain = sources
    for source in (kept, ahead):
        wait_for(
            lambda source=source: is_synced(primary, standby, source),  # type: ignore[misc]
            "a slot that is kept in step",
            lambda: run(standby, SLOTS),
        )
    release(kept.spool, "pipeline", kept.capture_all(11, 20))
    kept.insert(21, 30)  # left for after the promotion
    wait_for(lambda: replayed(standby) >= kept.position, "a standby that is level", lambda: replayed(standby))
    on_standby = plain.failure(SourceAddress.parse(standby.dsn("plain")))
    polled = refusal_to_poll(standby)
    standby.stop()
    ahead.capture_all(11, 20)  # the standby will never have these
    for source in sources:
        source.database.close()
    primary.stop("immediate")
    standby.start()
    run(standby, "SELECT pg_promote()")
    for source in sources:
        source.database = Database(source.database.name, standby.dsn(source.database.name))
        source.address = SourceAddress.parse(source.database.dsn)
    ((switch,),) = run(standby, "SELECT split_part(pg_read_file('pg_wal/00000002.history'), E'\\t', 2)")
    return Cluster(kept, ahead, plain, on_standby, polled, Position.parse(str(switch)))


SLOTS = (
    "SELECT slot_name, temporary, synced, invalidation_reason, confirmed_flush_lsn::text "
    "FROM pg_replication_slots"
)


def is_synced(primary: EmbeddedPostgres, standby: EmbeddedPostgres, source: Source) -> bool:
    """The standby takes over a slot only once it has replayed past the slot's own horizon; so the slot is
    moved on, too.
    """
    run(primary, "CHECKPOINT")
    # Once, and on disk: WAL also grows by itself, and a released position must not be ahead of it.
    target = release(source.spool, "pipeline", source.flushed)
    with source.capture():
        wait_for(
            lambda: source.confirmed >= target, f"a slot confirmed up to {target}", lambda: source.confirmed
        )
    source.wait_idle()
    run(standby, "SELECT pg_sync_replication_slots()")
    return (source.slot, False, True) in {row[:3] for row in run(standby, SLOTS)}


def refusal_to_poll(standby: EmbeddedPostgres) -> PenstockError:
    with (
        connect(SourceAddress.parse(standby.dsn("plain"))) as connection,
        pytest.raises(PenstockError) as refused,
    ):
        inspect_system(connection)
    return refused.value


def replayed(standby: EmbeddedPostgres) -> Position:
    return Position.parse(str(run(standby, "SELECT pg_last_wal_replay_lsn()::text")[0][0]))


def run(server: EmbeddedPostgres, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def test_L10_a_capture_continues_after_a_promotion_that_lost_none_of_its_changes(cluster: Cluster) -> None:
    source = cluster.kept
    before = load_identity(source.spool)
    assert before is not None
    assert before.timeline == 1
    held = source.status
    assert held is not None
    assert held.sealed <= cluster.switch
    with source.capture(failover=True) as capture:
        assert capture.wait_until(source.insert(31, 40), DEADLINE_SECONDS), source.state()
    rows = source.ids()
    assert rows[rows.index(21) :] == list(range(21, 41))
    assert len(rows) == len(set(rows))
    assert load_identity(source.spool) == replace(before, timeline=2)
    source.wait_idle()
    with source.capture() as capture:
        assert capture.wait_until(source.insert(41, 50), DEADLINE_SECONDS), (
            "and the next start finds nothing odd about it"
        )
    assert source.ids()[-10:] == list(range(41, 51))


def test_L10_a_capture_with_changes_that_the_promoted_server_lost_stops(cluster: Cluster) -> None:
    source = cluster.ahead
    held = source.status
    assert held is not None
    confirmed = source.confirmed
    rows = source.ids()
    for _ in range(2):
        error = source.failure()
        assert type(error) is TimelineChangedError
        assert error.code == "PEN-1212"
        assert error.message == (
            "the server is on timeline 2, and everything captured came from timeline 1, which the server "
            f"left at {cluster.switch}: the {held.sealed - cluster.switch} bytes of WAL from there to "
            f"{held.sealed} were captured, "
            "but the server lost them when it was promoted or restored"
        )
        assert error.hint == (
            f"{COPY_AGAIN}; with synchronized_standby_slots on the primary, the capture never runs "
            "ahead of the standby"
        )
    assert source.confirmed == confirmed
    assert source.ids() == rows
    identity = load_identity(source.spool)
    assert identity is not None
    assert identity.timeline == 1


def test_L10_a_slot_that_did_not_come_along_stops_the_capture(cluster: Cluster) -> None:
    source, rows = cluster.plain, cluster.plain.ids()
    error = source.failure()
    assert type(error) is TimelineChangedError
    assert error.message == (
        "the server is on timeline 2, and everything captured came from timeline 1; on the promoted server, "
        f"slot {source.slot} does not exist, so changes up to the switch at {cluster.switch} may be missing"
    )
    assert error.hint == SURVIVES
    assert source.ids() == rows == list(range(1, 11))
    assert source.database.query(
        "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", source.slot
    ) == [(0,)], "no slot is created"


def test_L10_a_slot_made_by_hand_on_the_promoted_server_is_not_trusted(cluster: Cluster) -> None:
    source, rows = cluster.plain, cluster.plain.ids()
    source.database.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", source.slot)
    try:
        confirmed = source.confirmed
        error = source.failure()
        assert source.confirmed == confirmed
    finally:
        source.database.query("SELECT pg_drop_replication_slot(%s)", source.slot)
    assert type(error) is TimelineChangedError
    assert error.message == (
        "the server is on timeline 2, and everything captured came from timeline 1; on the promoted server, "
        f"slot {source.slot} was not synchronised from the primary, so changes up to the switch at "
        f"{cluster.switch} may be missing"
    )
    assert error.hint == SURVIVES
    assert source.ids() == rows == list(range(1, 11))


def test_L10_an_unknown_timeline_is_reported(cluster: Cluster, tmp_path: Path) -> None:
    source = cluster.kept.with_spool(tmp_path / "spool")
    known = load_identity(cluster.kept.spool)
    assert known is not None
    ensure_identity(source.spool, replace(known, timeline=7))
    error = source.failure()
    assert type(error) is TimelineChangedError
    assert error.message == (
        "the server is on timeline 2, and everything captured came from timeline 7, which is not part of "
        "the server's history: the server was restored to a time before that timeline began"
    )
    assert error.hint == f"point source.dsn at the server that continued from timeline 7, or {COPY_AGAIN}"


def test_L11_a_standby_is_not_captured_from(cluster: Cluster) -> None:
    assert type(cluster.on_standby) is StandbyError
    assert str(cluster.on_standby) == (
        "PEN-1215: the server is a standby, on which publications and slots are not reliable\n"
        "  fix: point source.dsn at the primary; in a dsn with several hosts, "
        "target_session_attrs=read-write selects it"
    )


def test_standby_is_not_polled_since_it_does_not_know_the_open_transactions_of_its_primary(
    cluster: Cluster,
) -> None:
    assert type(cluster.polled) is StandbyError


# --- the option ---------------------------------------------------------------------------------------------


@pytest.mark.versions(17, 18)
def test_L10_failover_is_set_when_a_slot_is_created_and_added_to_an_existing_one(
    database: Database, tmp_path: Path
) -> None:
    made = Source(database, tmp_path / "made", provisioned=False)
    with made.capture(failover=True) as capture:
        assert capture.wait_beyond(Position.ZERO, DEADLINE_SECONDS), made.state()
        assert capture.wait_until(made.insert(1, 10), DEADLINE_SECONDS), made.state()
    made.wait_idle()
    assert is_failover(made)
    made.database.query("SELECT pg_drop_replication_slot(%s)", made.slot)
    made.database.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", made.slot)
    there = made.with_spool(tmp_path / "there")
    assert not is_failover(there)
    with there.capture(failover=True) as capture:
        assert capture.wait_until(there.insert(11, 20), DEADLINE_SECONDS), there.state()
    assert is_failover(there)
    assert there.ids() == list(range(11, 21))


def is_failover(source: Source) -> bool:
    return source.database.query(
        "SELECT failover FROM pg_replication_slots WHERE slot_name = %s", source.slot
    ) == [(True,)]


@pytest.mark.versions(16)
def test_L10_failover_on_a_server_that_does_not_know_it_is_refused_before_anything_is_made(
    database: Database, tmp_path: Path
) -> None:
    source = Source(database, tmp_path / "spool", provisioned=False)
    error = source.failure(failover=True)
    assert type(error) is SlotFailoverError
    assert str(error) == (
        "PEN-1216: source.failover is set, and the server is Postgres 16: slots are copied to standbys "
        "since Postgres 17\n"
        "  fix: remove source.failover from the configuration, or upgrade the server"
    )
    assert database.query("SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", source.slot) == [
        (0,)
    ]
    assert database.query("SELECT count(*) FROM pg_publication") == [(0,)]
