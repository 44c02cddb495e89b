"""Source operations with `capture: trigger`, other than reading changes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from penstock.config.model import PipelineConfig
from penstock.errors import SystemChangedError, UncheckedTimelineError
from penstock.pipeline.sources.adapter import source_adapter
from penstock.pipeline.table_selection import select_tables
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.pipeline.tables import Tables
from penstock.position import Position
from penstock.postgres.change_table import ChangeTable
from penstock.postgres.connection import connect
from penstock.postgres.server import log_wait
from penstock.testing.capture_conformance import deliver_three
from penstock.testing.streams import check_same, take
from tests.support.contract.trigger_harness import TriggerHarness


def promote(trigger: TriggerHarness, lost: int = 0) -> None:
    """Simulates another server with the change table of the old one, without its last changes."""
    trigger.database.execute(
        f"UPDATE {trigger.settings.name}.horizon SET timeline = '00000000', position = position - {lost}"
    )


def config_of(trigger: TriggerHarness, directory: Path) -> PipelineConfig:
    document = {
        "pipeline": "side",
        "source": {"dsn": trigger.database.dsn, "capture": "trigger", "slot": trigger.settings.name},
        "tables": [str(trigger.table), str(trigger.other)],
        "sink": {"delta": {"path": str(directory / "lake")}},
    }
    return PipelineConfig.model_validate(document)


def test_commits_before_a_table_was_seen_to_be_dropped_are_captured(
    trigger: TriggerHarness, tmp_path: Path
) -> None:
    """One poll orders many commits, at positions beyond the current end of the WAL."""
    trigger.capture().live().close()
    for each in range(50):
        trigger.database.execute(f"INSERT INTO {trigger.table} VALUES ({each}, 'x')")
    trigger.database.execute(f"DROP TABLE {trigger.table}")
    config = config_of(trigger, tmp_path)
    with connect(trigger.settings.address) as connection:
        selection = select_tables(connection, config, seen=source_adapter(config).seen)
        table = ChangeTable(connection, trigger.settings.name)
        table.sequence()
        commits = table.commits(Position.ZERO, 100)
    assert trigger.table not in selection.tables
    assert len(commits) == 50
    assert selection.seen_at is not None
    assert commits[-1].position <= selection.seen_at


def test_server_that_was_promoted_puts_nothing_into_order_until_its_reader_has_checked(
    trigger: TriggerHarness, tmp_path: Path
) -> None:
    events = deliver_three(trigger, confirm=lambda changes: changes[0].ack.confirm())
    promote(trigger)
    before = trigger.database.query(f"SELECT * FROM {trigger.settings.name}.horizon")
    side = source_adapter(config_of(trigger, tmp_path))
    with connect(trigger.settings.address) as connection:
        assert (side.goal(connection), side.seen(connection)) == (None, None)
    with pytest.raises(UncheckedTimelineError):
        list(trigger.capture().snapshot([trigger.table]))
    assert trigger.database.query(f"SELECT * FROM {trigger.settings.name}.horizon") == before
    with closing(trigger.capture().live()) as stream:
        check_same(take(stream, 2, trigger.deadline_seconds), events[1:], "the reader has checked")
    list(trigger.capture().snapshot([trigger.table]))
    with connect(trigger.settings.address) as connection:
        assert side.goal(connection) is not None


def test_promoted_server_without_the_read_changes_is_detected_during_a_snapshot(
    trigger: TriggerHarness,
) -> None:
    deliver_three(trigger, confirm=lambda changes: changes[0].ack.confirm())
    promote(trigger, lost=1_000_000)
    with pytest.raises(UncheckedTimelineError):
        list(trigger.capture().snapshot([trigger.table]))
    with (
        closing(trigger.capture().live()) as stream,
        pytest.raises(SystemChangedError, match="contains only those up to"),
    ):
        take(stream, 1, trigger.deadline_seconds)


def test_copy_that_was_begun_before_a_promotion_must_be_in_the_past_of_the_server(
    trigger: TriggerHarness, tmp_path: Path
) -> None:
    trigger.capture().live().close()
    side = source_adapter(config_of(trigger, tmp_path))
    with side.export(trigger.settings.address, log_wait) as exported:
        promote(trigger, lost=1)
    with connect(trigger.settings.address) as connection:
        table = ChangeTable(connection, trigger.settings.name)
        table.accept()
        assert table.sequence() > exported.fence
    with (
        pytest.raises(SystemChangedError, match="tables were copied as of"),
        side.export(trigger.settings.address, log_wait),
    ):
        pass


def test_table_ahead_of_a_promoted_server_is_detected_before_the_start(
    trigger: TriggerHarness, tmp_path: Path
) -> None:
    """Also a table that was copied at that position, although no epoch reached it."""
    trigger.capture().live().close()
    side = source_adapter(config_of(trigger, tmp_path))
    with connect(trigger.settings.address) as connection:
        copied = side.goal(connection)
        assert copied is not None
        tables = Tables(statuses={trigger.table: TableStatus(TableState.CATCHING_UP, copied, copied)})
        promote(trigger, lost=1)
        with pytest.raises(SystemChangedError, match="contains only those up to"):
            side.check_origin(connection, tables, None, side.identify())
        assert side.goal(connection) is None
        trigger.database.execute(f"UPDATE {trigger.settings.name}.horizon SET position = position + 1")
        side.check_origin(connection, tables, None, side.identify())
        assert side.goal(connection) is not None
