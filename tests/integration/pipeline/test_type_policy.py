"""Changed `types:` settings: a target never holds two representations of one column."""

from __future__ import annotations

import pytest

from penstock.pipeline.table_states import TableState
from penstock.schema import TableName
from tests.support.fix_pipeline import MirrorFactory
from tests.support.fix_postgres import Database
from tests.support.types.every_type import create_every, insert_every

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.mark.parametrize("sink", ["delta", "iceberg"])
def test_S07_a_table_is_resynced_when_its_column_type_in_the_target_changes(
    database: Database, mirror_into: MirrorFactory, sink: str
) -> None:
    database.execute(
        "CREATE TABLE prices (id int PRIMARY KEY, amount numeric); INSERT INTO prices VALUES (1, 1.50)"
    )
    database.execute("CREATE TABLE names (id int PRIMARY KEY, name text); INSERT INTO names VALUES (1, 'a')")
    mirror_into(sink, types={"numeric": "string"}).run_once()
    database.execute("INSERT INTO prices VALUES (2, 2.50)")
    lake = mirror_into(sink, types={"numeric": "decimal(20,4)"})
    result = lake.run_once()
    assert not result.failed, result.failed
    lake.assert_equal("public.names", "public.prices")
    assert {str(row.amount) for row in lake.rows("public.prices")} == {"1.5000", "2.5000"}


def test_S07_a_table_that_cannot_be_resynced_fails_when_its_column_type_in_the_target_changes(
    database: Database, mirror_into: MirrorFactory
) -> None:
    database.execute(
        "CREATE TABLE prices (id int PRIMARY KEY, amount numeric); INSERT INTO prices VALUES (1, 1.50)"
    )
    mirror_into("delta", mode="history", types={"numeric": "string"}).run_once()
    database.execute("INSERT INTO prices VALUES (2, 2.50)")
    lake = mirror_into("delta", mode="history", types={"numeric": "decimal(20,4)"})
    status = lake.run_once().tables["public.prices"]
    assert status.state is TableState.FAILED
    assert "amount" in (status.reason or "")
    assert "penstock tables resync" in (status.remedy or "")
    assert {row.amount for row in lake.rows("public.prices")} == {"1.50"}


@pytest.mark.parametrize("sink", ["delta", "iceberg", "postgres"])
def test_S07_a_restart_with_the_same_types_resyncs_nothing(
    database: Database, mirror_into: MirrorFactory, sink: str
) -> None:
    create_every(database)
    insert_every(database, 1)
    lake = mirror_into(sink)
    copies = []
    for first in (5, 9):
        assert not lake.run_once().failed
        copies.append(lake.open_sink().load_target(TableName("public", "every")))
        insert_every(database, first)
    before, after = copies
    assert before is not None
    assert after is not None
    assert before.copy is not None
    assert (after.copy, after.schema) == (before.copy, before.schema)
