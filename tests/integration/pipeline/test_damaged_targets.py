"""Targets that somebody damaged: their tables fail alone, and the remedy in their status brings them back."""

from __future__ import annotations

import pytest

from penstock.pipeline.states import TableState
from penstock.pipeline.status import inspect_status
from penstock.schema import TableName
from tests.fix_pipeline import MirrorFactory
from tests.fix_postgres import Database
from tests.integration.pipeline.test_online import running

pytestmark = pytest.mark.spark
TABLES = ("public.good", "public.lost", "public.restored")


def test_a_lost_data_file_and_a_restored_table_fail_alone_and_a_resync_brings_both_back(database: Database, mirror: MirrorFactory) -> None:
    for table in TABLES:
        database.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, v text); INSERT INTO {table} SELECT g, 'v' FROM generate_series(1, 50) g"
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
        database.execute("UPDATE lost SET v = 'x' WHERE id = 1; INSERT INTO restored VALUES (52, 'x'); INSERT INTO good VALUES (52, 'x')")
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
            run.order("renew", table)
        for table in ("public.lost", "public.restored"):
            run.wait_for_state(table, TableState.STREAMING)
        database.execute("INSERT INTO lost VALUES (54, 'z'); INSERT INTO restored VALUES (54, 'z')")
        run.wait_for_rows("public.lost", 52)
        run.wait_for_rows("public.restored", 53)
    made.run_once()
    made.assert_equal(*TABLES)
    assert run.pipeline.statuses[TableName("public", "good")].state is TableState.STREAMING
