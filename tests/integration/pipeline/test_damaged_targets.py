"""Damaged targets: only their tables fail, and the fix in their status repairs them."""

from __future__ import annotations

import shutil

import pytest
from typing_extensions import override

from penstock.cli.table_commands import order
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.status import inspect_status
from penstock.pipeline.table_states import TableState
from penstock.schema import TableName
from tests.support.fix_pipeline import Mirror, MirrorFactory
from tests.support.fix_postgres import Database
from tests.support.pipeline.running import running

pytestmark = pytest.mark.spark
TABLES = ("public.good", "public.lost", "public.restored")


def test_a_lost_data_file_and_a_restored_table_fail_alone_and_a_resync_brings_both_back(
    database: Database, mirror: MirrorFactory
) -> None:
    for table in TABLES:
        database.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, v text); "
            f"INSERT INTO {table} SELECT g, 'v' FROM generate_series(1, 50) g"
        )
    made = mirror()
    with running(made) as run:
        for table in TABLES:
            run.wait_for_state(table, TableState.STREAMING)
            database.execute(f"INSERT INTO {table} VALUES (51, 'w')")
        for table in TABLES:
            run.wait_for_rows(table, 51)
        path = made.config.sink.root / "public" / "lost"
        file = min(path.glob("*.parquet"), key=lambda each: -each.stat().st_size)
        file.unlink()
        made.damage("public.restored", "RESTORE TABLE {} TO VERSION AS OF 1")
        database.execute(
            "UPDATE lost SET v = 'x' WHERE id = 1; INSERT INTO restored VALUES (52, 'x'); "
            "INSERT INTO good VALUES (52, 'x')"
        )
        run.wait_for_rows("public.good", 52)
        database.execute("INSERT INTO good VALUES (53, 'y')")
        run.wait_for_rows("public.good", 53)
        run.wait_for_state("public.lost", TableState.FAILED)
        run.wait_for_state("public.restored", TableState.FAILED)
        epoch = inspect_status(made.config).epoch
        assert epoch is not None
        statuses = {str(name): status for name, status in epoch.tables.items()}
        assert (statuses["public.lost"].reason or "").startswith("PEN-3006")
        assert file.name in (statuses["public.lost"].reason or "")
        assert (statuses["public.restored"].reason or "").startswith("PEN-3002")
        assert statuses["public.good"].state is TableState.STREAMING
        for table in ("public.lost", "public.restored"):
            assert f"penstock tables resync CONFIG {table}" in (statuses[table].remedy or "")
            run.order("resync", table)
        for table in ("public.lost", "public.restored"):
            run.wait_for_state(table, TableState.STREAMING)
        database.execute("INSERT INTO lost VALUES (54, 'z'); INSERT INTO restored VALUES (54, 'z')")
        run.wait_for_rows("public.lost", 52)
        run.wait_for_rows("public.restored", 53)
    made.run_once()
    made.assert_equal(*TABLES)
    assert run.pipeline.statuses[TableName("public", "good")].state is TableState.STREAMING


class _Impatient(PipelineObserver):
    """Ends a run that starts again more often than `most` times."""

    def __init__(self, most: int) -> None:
        self._left = most

    @override
    def interrupted(self, reason: str, pause_seconds: float) -> None:
        self._left -= 1
        assert self._left >= 0, reason


def _damage_log(made: Mirror, table: str) -> None:
    for commit in (made.config.sink.root / table.replace(".", "/") / "_delta_log").glob("*.json"):
        commit.write_text('{"commitInfo"')


@pytest.mark.parametrize("tables", [TABLES[:1], TABLES[:2]], ids=["the_only_table", "both_tables"])
def test_tables_whose_logs_are_all_damaged_fail_and_a_resync_brings_them_back(
    database: Database, mirror: MirrorFactory, tables: tuple[str, ...]
) -> None:
    for table in tables:
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY); INSERT INTO {table} VALUES (1)")
    made = mirror()
    made.run_once()
    for table in tables:
        _damage_log(made, table)
        database.execute(f"INSERT INTO {table} VALUES (2)")
    result = made.run_once(_Impatient(5))
    assert set(result.failed) == set(tables)
    epoch = inspect_status(made.config).epoch
    assert epoch is not None
    for table in tables:
        status = epoch.tables[TableName.parse(table)]
        assert status.state is TableState.FAILED
        assert (status.reason or "").startswith("PEN-3006")
        assert f"penstock tables resync CONFIG {table}" in (status.remedy or "")
        assert str(made.config.sink.root / table.replace(".", "/")) in (status.remedy or "")
        order(made.path, [table], "resync")
    assert set(made.run_once(_Impatient(5)).failed) == set(tables), (
        "nothing is overwritten that could be restored"
    )
    for table in tables:
        shutil.rmtree(made.config.sink.root / table.replace(".", "/"))
    assert not made.run_once(_Impatient(5)).failed
    made.assert_equal(*tables)


def test_a_run_whose_tables_are_all_damaged_takes_an_order_to_resync(
    database: Database, mirror: MirrorFactory
) -> None:
    database.execute("CREATE TABLE lost (id int PRIMARY KEY); INSERT INTO lost VALUES (1)")
    made = mirror()
    made.run_once()
    _damage_log(made, "public.lost")
    order(made.path, ["public.lost"], "resync")
    with running(made, _Impatient(5)) as run:
        run.wait_for_state("public.lost", TableState.FAILED)
        shutil.rmtree(made.config.sink.root / "public" / "lost")
        run.wait_for_state("public.lost", TableState.STREAMING)
    made.assert_equal("public.lost")
