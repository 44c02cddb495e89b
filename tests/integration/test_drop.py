"""`penstock drop` removes what a pipeline created at its source, and nothing that others may need."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from penstock.capture.provision import ensure_capture
from penstock.capture.trigger.provision import ensure_trigger_coverage
from penstock.cli.main import app
from penstock.config.model import PipelineConfig, load_config
from penstock.errors import PipelineBusyError, SlotBusyError
from penstock.pipeline.sources.drop import plan_drop, run_drop
from penstock.position import Position
from penstock.postgres.change_table import ChangeTable
from penstock.postgres.connection import connect, connect_replication
from penstock.postgres.publication import ensure_trigger, is_installed
from penstock.schema import TableName
from penstock.spool.ownership import SpoolLock
from penstock.spool.retention import set_released
from tests.support.fix_pipeline import mirror_document
from tests.support.fix_postgres import Database
from tests.support.holding import locked_elsewhere

ITEMS = TableName("public", "items")


class Source:
    """A pipeline that has run, as seen from its source."""

    def __init__(self, database: Database, directory: Path) -> None:
        self.database = database
        self.path = directory / "pipeline.yaml"
        database.execute("CREATE TABLE items (id int PRIMARY KEY)")
        self.configure()
        self.provide()

    def configure(self, **source: Any) -> PipelineConfig:
        document = mirror_document(self.database)
        document["source"] |= {"event_trigger": True, **source}
        self.path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return self.config

    @property
    def config(self) -> PipelineConfig:
        return load_config(self.path)

    def provide(self) -> None:
        ensure_capture(self.config.source.address(), self.config.slot, self.config.publication, [ITEMS])
        with connect(self.config.source.address()) as connection:
            ensure_trigger(connection)

    @property
    def left(self) -> set[str]:
        """Whether slot, publication and trigger exist."""
        found = {
            name
            for (name,) in self.database.query(
                "SELECT slot_name::text FROM pg_replication_slots WHERE database = current_database()"
            )
        }
        found |= {
            f"publication {name}"
            for (name,) in self.database.query("SELECT pubname::text FROM pg_publication")
        }
        with connect(self.config.source.address()) as connection:
            return found | ({"trigger"} if is_installed(connection) else set())


@pytest.fixture
def source(database: Database, tmp_path: Path) -> Source:
    return Source(database, tmp_path)


def test_change_table_and_triggers_go(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE items (id int PRIMARY KEY)")
    path = tmp_path / "pipeline.yaml"
    path.write_text(
        yaml.safe_dump(mirror_document(database, source={"dsn": database.dsn, "capture": "trigger"})),
        encoding="utf-8",
    )
    config = load_config(path)
    ensure_trigger_coverage(config.source.address(), config.slot, [ITEMS], manage=True)
    with connect(config.source.address()) as reader:
        assert ChangeTable(reader, config.slot).take_lease() is None
        with pytest.raises(SlotBusyError):
            plan_drop(config)
    plan = plan_drop(config)
    assert plan.dropped == [
        f"change table {config.slot}, with its triggers on all tables and all unread changes"
    ]
    run_drop(config, plan)
    assert database.query("SELECT count(*) FROM pg_trigger") == [(0,)]
    assert plan_drop(config).dropped == []


def test_everything_is_dropped_after_a_question_and_a_second_time_nothing_is_left(source: Source) -> None:
    name = source.config.slot
    assert source.left == {name, f"publication {name}", "trigger"}
    refused = CliRunner().invoke(app, ["drop", str(source.path)], input="n\n")
    assert refused.exit_code == 1
    assert f"would drop: replication slot {name}" in refused.output
    assert source.left == {name, f"publication {name}", "trigger"}
    plan = plan_drop(source.config)
    done = CliRunner().invoke(app, ["drop", str(source.path)], input="y\n")
    assert done.exit_code == 0, done.output
    assert source.left == set()
    run_drop(source.config, plan)
    again = CliRunner().invoke(app, ["drop", str(source.path), "--yes"])
    assert again.exit_code == 0
    assert "no objects to drop at its source" in again.output


def test_objects_that_others_may_need_stay_and_are_named(source: Source) -> None:
    name = source.config.slot
    source.database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", f"{name}_other")
    source.configure(publication=source.config.publication)
    done = CliRunner().invoke(app, ["drop", str(source.path), "--yes"])
    assert done.exit_code == 0, done.output
    assert source.left == {f"{name}_other", f"publication {name}", "trigger"}
    assert "keeps: publication" in done.output
    assert f"{name}_other" in done.output

    source.configure()
    source.provide()
    set_released(source.config.spool, "neighbour", Position.of(1))
    plan = plan_drop(source.config)
    assert plan.dropped == []
    assert any("used by neighbour" in each for each in plan.kept)


def test_nothing_is_dropped_while_a_pipeline_runs(source: Source) -> None:
    before, plan = source.left, plan_drop(source.config)
    source.config.state.mkdir()
    with locked_elsewhere(source.config.lock), pytest.raises(PipelineBusyError, match="is running"):
        run_drop(source.config, plan)
    with SpoolLock(source.config.spool), pytest.raises(PipelineBusyError, match="a capture is writing"):
        plan_drop(source.config)
    assert source.left == before


def test_a_slot_read_by_another_process_is_not_dropped(source: Source) -> None:
    name = source.config.slot
    with closing(connect_replication(source.config.source.address())) as reader:
        options = f"(proto_version '1', publication_names '{name}')"
        reader.pgconn.exec_(f"START_REPLICATION SLOT {name} LOGICAL 0/0 {options}".encode())
        with pytest.raises(SlotBusyError):
            plan_drop(source.config)
