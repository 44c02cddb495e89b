"""Snapshots whose query dies between sink and commit: the sink holds the batch, and passes over its repetition, as Delta does."""

from __future__ import annotations

from penstock.spark.snapshot_plan import load_plan
from tests.integration.source.engine import Checkpoint, LocalSource, fold
from tests.waiting import wait_for

BLOCK = {"chunkBytes": "8192", "maxBytesPerBatch": "8192"}
CONSUMER = "spark-public.orders"


def die_after_the_sink(local: LocalSource, checkpoint: Checkpoint, batches: int) -> None:
    """So many batches, one block of the table each; the last is in the sink and not in the commit log."""
    with local.run(checkpoint, BLOCK) as run:
        for _ in range(batches - 1):
            assert run.step()
        assert run.step(keeps=True, commits=False)
    local.wait_until_free()
    # As long as the snapshot is held, VACUUM takes nothing away.
    held = "SELECT count(*) FROM pg_replication_slots WHERE temporary AND database = current_database()"
    wait_for(lambda: local.database.query(held) == [(0,)], "end of the snapshot")


def test_N03_table_rewritten_after_the_sink_kept_a_batch_is_whole_in_the_end(local: LocalSource) -> None:
    local.insert(1, 1000)
    checkpoint = Checkpoint()
    die_after_the_sink(local, checkpoint, batches=3)
    # Blocks that are still to be read come to lie where the batch that is passed over begins.
    local.database.execute("DELETE FROM orders WHERE id <= 600")
    local.database.execute("VACUUM FULL orders")
    with local.run(checkpoint, BLOCK, older=True) as run:
        run.until(lambda rows: fold(rows) == local.current, "rows equal to the table")
    assert set(range(601, 1001)) <= {row["id"] for row in checkpoint.rows if row["_change_type"] == "snapshot"}


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
    # Room in the block of the batch that is passed over: the row from the end of the table takes it. The change does not carry its value.
    execute("DELETE FROM orders WHERE id = ANY (%s)", [row["id"] for row in checkpoint.kept[1][:100]])
    execute("VACUUM orders")
    execute("UPDATE orders SET id = id WHERE id = 900")
    assert local.database.query("SELECT (ctid::text::point)[0]::int FROM orders WHERE id = 900") == [(1,)]
    with local.run(checkpoint, BLOCK) as run:
        run.until(lambda rows: len(rows) > 1000 and fold(rows).keys() == local.current.keys(), "all keys")
    assert fold(checkpoint.rows) == local.current
    plan = load_plan(local.spool, CONSUMER)
    assert plan is not None
    assert plan.renewals == 1
