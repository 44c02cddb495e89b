"""What a pipeline asks of a source that is captured by triggers, beside the changes themselves."""

from __future__ import annotations

from pathlib import Path

from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.sides import side_of
from penstock.pipeline.tables import select_tables
from penstock.position import Position
from penstock.postgres.change_table import ChangeTable
from penstock.postgres.connection import connect
from tests.contract.trigger_harness import TriggerHarness


def config_of(trigger: TriggerHarness, directory: Path) -> PipelineConfig:
    document = {
        "pipeline": "side",
        "source": {"dsn": trigger.database.dsn, "capture": "trigger", "slot": trigger.settings.name},
        "tables": [str(trigger.table), str(trigger.other)],
        "sink": {"delta": {"path": str(directory / "lake")}},
    }
    return PipelineConfig.model_validate(document)


def test_all_that_committed_before_a_table_was_seen_to_be_gone_comes_up_to_where_it_was_seen(
    trigger: TriggerHarness, tmp_path: Path
) -> None:
    """One look puts many commits into order, at positions beyond the log of the moment, whenever they were made."""
    trigger.capture().live().close()
    for each in range(50):
        trigger.database.execute(f"INSERT INTO {trigger.table} VALUES ({each}, 'x')")
    trigger.database.execute(f"DROP TABLE {trigger.table}")
    config = config_of(trigger, tmp_path)
    with connect(trigger.settings.address) as connection:
        selection = select_tables(connection, config, seen=side_of(config).seen)
        table = ChangeTable(connection, trigger.settings.name)
        table.sequence()
        commits = table.commits(Position.ZERO, 100)
    assert trigger.table not in selection.tables
    assert len(commits) == 50
    assert selection.seen_at is not None
    assert commits[-1].position <= selection.seen_at
