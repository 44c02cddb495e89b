"""Snapshots whose query dies between sink and commit: the sink has the batch and skips its repetition, as
Delta does.
"""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError, TableWithoutKeyError
from penstock.position import Position
from penstock.postgres.catalog import inspect_schema, inspect_tables
from penstock.postgres.chunks import plan_chunks, read_chunk
from penstock.postgres.connection import connect
from penstock.postgres.snapshot_export import share_snapshot
from penstock.spark import snapshot as snapshots
from penstock.spark.snapshot_plan import load_plan
from tests.support.source.engine import Checkpoint, LocalSource, fold
from tests.support.waiting import wait_for

BLOCK = {"chunkBytes": "8192", "maxBytesPerBatch": "8192"}
CONSUMER = "spark-public.orders"


def die_after_the_sink(local: LocalSource, checkpoint: Checkpoint, batches: int) -> None:
    """This number of batches, one block of the table each. The last one is in the sink and not in the commit
    log.
    """
    with local.run(checkpoint, BLOCK) as run:
        for _ in range(batches - 1):
            assert run.step()
        assert run.step(keeps=True, commits=False)
    local.wait_until_free()
    # While the snapshot is held, VACUUM removes nothing.
    held = "SELECT count(*) FROM pg_replication_slots WHERE temporary AND database = current_database()"
    wait_for(lambda: local.database.query(held) == [(0,)], "end of the snapshot")


def test_N03_table_rewritten_after_the_sink_kept_a_batch_is_whole_in_the_end(local: LocalSource) -> None:
    local.insert(1, 1000)
    checkpoint = Checkpoint()
    die_after_the_sink(local, checkpoint, batches=3)
    # Rows of unread blocks move to the place where the skipped batch begins.
    local.database.execute("DELETE FROM orders WHERE id <= 600")
    local.database.execute("VACUUM FULL orders")
    with local.run(checkpoint, BLOCK, older=True) as run:
        run.until(lambda rows: fold(rows) == local.current, "rows equal to the table")
    assert set(range(601, 1001)) <= {
        row["id"] for row in checkpoint.rows if row["_change_type"] == "snapshot"
    }


def test_N03_row_that_moved_into_a_batch_that_the_sink_holds_keeps_its_long_value(local: LocalSource) -> None:
    execute, size = local.database.execute, "SELECT pg_relation_size('orders')"
    execute("ALTER TABLE orders ALTER note SET STORAGE EXTERNAL")
    local.insert(1, 899)
    execute("INSERT INTO orders VALUES (900, repeat('long', 2000))")
    local.insert(901, 1000)
    # No block has room for another row.
    before, number = local.database.query(size), 1000
    while local.database.query(size) == before:
        number += 1
        local.insert(number, number)
    execute("DELETE FROM orders WHERE id = %s", number)
    execute("VACUUM orders")
    assert local.database.query(size) == before
    checkpoint = Checkpoint()
    die_after_the_sink(local, checkpoint, batches=2)
    # The row from the end of the table moves into free space in the block of the skipped batch. The change
    # lacks its long value.
    execute("DELETE FROM orders WHERE id = ANY (%s)", [row["id"] for row in checkpoint.kept[1][:100]])
    execute("VACUUM orders")
    execute("UPDATE orders SET id = id WHERE id = 900")
    assert local.database.query("SELECT (ctid::text::point)[0]::int FROM orders WHERE id = 900") == [(1,)]
    with local.run(checkpoint, BLOCK) as run:
        run.until(lambda rows: len(rows) > 1000 and fold(rows).keys() == local.current.keys(), "all keys")
    assert fold(checkpoint.rows) == local.current
    plan = load_plan(local.spool, CONSUMER)
    assert plan is not None
    assert plan.replans == 1


def test_query_that_ends_does_not_end_before_its_rows_are_of_one_moment(local: LocalSource) -> None:
    """Blocks read under a later snapshot show commits after the fence, so all other blocks must show them
    too.
    """
    local.insert(1, 1000)
    checkpoint = Checkpoint()
    goal = str(local.position)
    with local.run(checkpoint, BLOCK, endingPosition=goal) as run:
        assert run.step()
    local.wait_until_free()
    # A transaction that moves an amount from a row in a read block to a row in an unread block.
    with local.database.transaction():
        local.database.execute("UPDATE orders SET note = 'gives' WHERE id = 1")
        local.database.execute("UPDATE orders SET note = 'takes' WHERE id = 1000")
    with local.run(checkpoint, BLOCK, older=True, endingPosition=goal) as run:
        run.end()
    plan = load_plan(local.spool, CONSUMER)
    assert plan is not None
    assert plan.last is not None
    assert plan.last > Position.parse(goal)
    assert Position.parse(checkpoint.offsets[-1]["position"]) >= plan.last
    state = fold(checkpoint.rows)
    assert (state[1], state[1000]) == ("gives", "takes")
    assert state == local.current


def keyless(local: LocalSource) -> None:
    local.database.execute("CREATE TABLE aaa_keyed (id int PRIMARY KEY, note text)")
    local.database.execute("CREATE TABLE keyless (id int, note text)")
    local.database.execute("ALTER TABLE keyless REPLICA IDENTITY FULL")
    for table in ("aaa_keyed", "keyless"):
        local.database.execute(f"INSERT INTO {table} SELECT g, 'n' FROM generate_series(1, 1000) g")


def test_changes_of_a_keyed_table_do_not_end_the_snapshot_of_one_without_a_key(local: LocalSource) -> None:
    keyless(local)
    checkpoint = Checkpoint()
    options = {
        **BLOCK,
        "maxBytesPerBatch": str(3 * 8192),
        "table": "",
        "tables": "public.aaa_keyed, public.keyless",
    }
    with local.run(checkpoint, options) as run:
        assert run.step()
        local.database.execute("TRUNCATE aaa_keyed")
        run.until(
            lambda rows: {row["_change_type"] for row in rows} >= {"truncate"},
            "the changes after the snapshot",
        )
    names = [row["_table"] for row in checkpoint.rows if row["_change_type"] == "snapshot"]
    assert names == ["public.keyless"] * 1000


def test_fix_of_a_snapshot_without_a_key_that_was_lost_works(local: LocalSource) -> None:
    """Under Spark 4.1, an AvailableNow query takes one batch per run: rows read in two batches are lost every
    time.
    """
    keyless(local)
    options = {**BLOCK, "table": "public.keyless"}
    checkpoint = Checkpoint()
    with local.run(checkpoint, options, older=True) as run:
        assert run.step()
    with local.run(checkpoint, options, older=True) as run, pytest.raises(TableWithoutKeyError) as raised:
        run.step()
    hint = str(raised.value.hint)
    limit = hint.partition("maxBytesPerBatch at ")[2].partition(" ")[0]
    anew = Checkpoint()
    with local.run(anew, options, older=True, maxBytesPerBatch=limit) as run:
        assert run.step()
    assert len(anew.rows) == 1000
    with local.run(anew, options, older=True, maxBytesPerBatch=limit) as run:
        local.database.execute("INSERT INTO keyless VALUES (1001, 'new')")
        run.until(lambda rows: len(rows) == 1001, "the next change")


def test_snapshot_of_more_pieces_than_places_can_be_given_to_is_refused(
    local: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert snapshots._MOST_STEPS * snapshots._ORDINALS_PER_STEP <= 1 << 63
    local.insert(1, 1000)
    monkeypatch.setattr(snapshots, "_MOST_FIRST_STEPS", 2)
    with (
        local.run(Checkpoint(), BLOCK) as run,
        pytest.raises(ConfigError, match="more than the limit of 2") as raised,
    ):
        run.step()
    assert "chunkBytes" in str(raised.value.hint)


def test_holder_of_a_snapshot_counts_its_own_readers_alone(local: LocalSource) -> None:
    """Otherwise a reader that reads rarely would keep all snapshots open."""
    local.insert(1, 3)
    with connect(local.address) as connection:
        (table,) = inspect_tables(connection)
        (chunk,) = plan_chunks(connection, table, inspect_schema(connection, table), 1 << 30, None)
    with share_snapshot(local.address) as mine, share_snapshot(local.address) as others:
        batches = read_chunk(local.address, mine.name, chunk)
        assert next(batches).num_rows == 3
        assert (mine.count_readers(), others.count_readers()) == (1, 0)
        batches.close()
