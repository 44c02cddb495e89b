"""A slot beyond max_slot_wal_keep_size before the next checkpoint: every report warns, and nothing is
lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import yaml

from penstock.config.model import load_config
from penstock.pipeline.checks.check import check_pipeline
from penstock.pipeline.sources.adapter import source_adapter
from penstock.pipeline.status import inspect_status
from penstock.postgres.connection import connect
from penstock.spool.retention import release
from tests.support.fix_postgres import server_directory
from tests.support.slot.scratch_server import ScratchServer
from tests.support.slot.source import Source
from tests.support.waiting import DEADLINE_SECONDS, wait_for

CODE = "PEN-1220"
FIX = (
    "let the reader of the slot catch up now; until it has caught up: "
    "ALTER SYSTEM SET max_slot_wal_keep_size = -1; SELECT pg_reload_conf();"
)


@pytest.fixture
def patient(postgres_version: int) -> Iterator[ScratchServer]:
    """A server that makes no automatic checkpoints during the test."""
    with server_directory() as directory:
        server = ScratchServer(
            directory, postgres_version, {"max_wal_size": "4GB", "checkpoint_timeout": "1h"}
        )
        with server.postgres:
            yield server


@pytest.fixture
def strained(patient: ScratchServer, tmp_path: Path) -> Iterator[Source]:
    """Rows 1 to 10 are captured; the WAL of rows 11 to 20 would be removed by the next checkpoint."""
    source = Source(patient.create_database(), tmp_path / "spool")
    release(source.spool, "pipeline", source.capture_all(1, 10))
    patient.set(max_slot_wal_keep_size="16MB")
    source.insert(11, 20)
    with psycopg.connect(source.database.dsn, autocommit=True) as session:
        for _ in range(4):
            session.execute("SELECT pg_logical_emit_message(false, 'filler', 'x')")
            session.execute("SELECT pg_switch_wal()")
    assert wal_status(source) == "unreserved"
    yield source
    source.database.close()


def wal_status(source: Source) -> str:
    return str(
        source.database.query(
            "SELECT wal_status FROM pg_replication_slots WHERE slot_name = %s", source.slot
        )[0][0]
    )


def reason(source: Source) -> str:
    return (
        f"slot {source.slot} retains more WAL than max_slot_wal_keep_size: the next checkpoint may "
        "remove WAL that the slot needs, and invalidate the slot"
    )


def config_of(source: Source, directory: Path) -> Path:
    document = {
        "pipeline": "strained",
        "source": {"dsn": source.database.dsn, "slot": source.slot, "publication": "p"},
        "tables": ["public.t"],
        "sink": {"delta": {"path": "lake"}},
    }
    path = directory / "pipeline.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


@pytest.mark.versions(14, 18)
def test_L06_a_slot_that_the_next_checkpoint_may_invalidate_is_reported_before_the_first_row_and_loses_none(
    strained: Source, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, path = strained, config_of(strained, tmp_path)
    report = check_pipeline(path)
    (warning,) = [finding for finding in report.warnings if finding.code == CODE]
    assert (report.problems, warning.step, warning.what, warning.fix) == ([], "slot", reason(source), FIX)
    config = load_config(path)
    assert f"{CODE}: {reason(source)}; fix: {FIX}" in inspect_status(config).warnings
    with connect(source.address) as connection:
        assert [str(risk) for risk in source_adapter(config).inspect_risks(connection)] == [
            f"{CODE}: {reason(source)}\n  fix: {FIX}"
        ]
    with caplog.at_level(logging.WARNING), source.capture() as capture:
        assert capture.wait_until(source.position, DEADLINE_SECONDS), source.state()
    (record,) = [record for record in caplog.records if record.getMessage() == "the slot may be invalidated"]
    assert (record.__dict__["code"], record.__dict__["reason"], record.__dict__["fix"]) == (
        CODE,
        reason(source),
        FIX,
    )
    assert source.ids() == list(range(11, 21)), "and those before were released"


def test_L06_the_remedy_saves_the_slots_wal_from_the_checkpoint(
    patient: ScratchServer, strained: Source
) -> None:
    source = strained
    for statement in FIX.partition(": ")[2].split("; "):
        source.database.execute(statement)
    wait_for(lambda: wal_status(source) != "unreserved", "another state", lambda: wal_status(source))
    patient.fill_log(2)
    assert wal_status(source) in ("reserved", "extended")
    with source.capture() as capture:
        assert capture.wait_until(source.position, DEADLINE_SECONDS), source.state()
    assert source.ids() == list(range(11, 21)), "and those before were released"
