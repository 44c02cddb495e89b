"""Where a query starts and which slot and spool it may use: a real server and spool, Spark's calls without
Spark.
"""

from __future__ import annotations

import pytest

from penstock.errors import PositionGapError, SpoolFormatError, SystemChangedError
from penstock.position import Position
from penstock.spool.ownership import CaptureIdentity, SpoolLock, ensure_identity, load_identity
from penstock.spool.retention import release, released_positions
from tests.support.source.engine import Checkpoint, LocalSource
from tests.support.waiting import wait_for

CONSUMER = "spark-public.orders"


def ids(checkpoint: Checkpoint) -> list[int]:
    return [row["id"] for row in checkpoint.rows]


@pytest.mark.parametrize("field", ["slot", "publication", "system_identifier"])
def test_spool_of_another_source_is_neither_read_nor_released(local: LocalSource, field: str) -> None:
    """Another capture holds the lock, or none does: the query itself has to check."""
    local.provision()
    local.insert(1, 3)
    system = local.database.query("SELECT system_identifier::text FROM pg_control_system()")[0][0]
    mine = {"slot": local.slot, "publication": local.slot, "system_identifier": system}
    ensure_identity(local.spool, CaptureIdentity(**{**mine, field: "other"}, timeline=1))
    files = sorted(local.spool.rglob("*"))
    for start in ("snapshot", "now", "slot", "0/100"):
        with (
            local.run(startingPosition=start) as run,
            pytest.raises((SpoolFormatError, SystemChangedError)) as raised,
        ):
            run.step()
        assert 'option("spool"' in str(raised.value.hint)
        if field != "system_identifier":
            assert f'option("{field}", "other")' in str(raised.value.hint)
        assert sorted(local.spool.rglob("*")) == files
    assert local.database.query("SELECT count(*) FROM pg_publication") == [(1,)]


def test_resumed_query_checks_the_owner_of_the_spool_too(local: LocalSource) -> None:
    checkpoint = Checkpoint()
    local.insert(1, 3)
    with local.run(checkpoint) as run:
        run.until(lambda rows: len(rows) == 3, "rows")
        local.insert(4, 4)
        wait_for(lambda: run.step(keeps=False, commits=False), "a batch to be repeated")
    local.wait_until_free()
    identity = load_identity(local.spool)
    assert identity is not None
    capture = local.spool / "capture.json"
    capture.write_bytes(capture.read_bytes().replace(identity.system_identifier.encode(), b"77"))
    before = released_positions(local.spool)
    # Another one captures, so that ours waits.
    with SpoolLock(local.spool), local.run(checkpoint) as run, pytest.raises(SystemChangedError):
        run.step()
    assert released_positions(local.spool) == before


def test_spool_that_becomes_anothers_at_the_last_moment_is_left_alone(local: LocalSource) -> None:
    """No capture had written into it when the query checked first."""
    local.provision()
    checkpoint = Checkpoint()
    with SpoolLock(local.spool), local.run(checkpoint, startingPosition="slot") as run:
        assert not run.step()
        ensure_identity(local.spool, CaptureIdentity("other", "other", "77", 1))
        with pytest.raises(SpoolFormatError):
            run.step()


@pytest.mark.parametrize(
    ("older", "other"), [(True, "now"), (False, "now"), (False, "snapshot"), (True, "0/100")]
)
def test_first_batch_is_as_planned_although_the_option_has_changed(
    local: LocalSource, other: str, older: bool
) -> None:
    local.provision()
    local.insert(1, 3)
    checkpoint = Checkpoint()
    with local.run(checkpoint, older=older, startingPosition="slot") as run:
        wait_for(lambda: run.step(keeps=False, commits=False), "first batch")
    local.wait_until_free()
    with local.run(checkpoint, older=older, startingPosition=other) as run:
        run.until(lambda rows: rows, "rows of the first batch")
    assert ids(checkpoint) == [1, 2, 3]
    assert checkpoint.offsets[0]["begins"] == "slot"


def test_snapshot_in_one_batch_that_is_repeated_stays_a_snapshot(local: LocalSource) -> None:
    local.insert(1, 3)
    checkpoint = Checkpoint()
    with local.run(checkpoint, older=True) as run:
        assert run.step(keeps=False, commits=False)
    local.wait_until_free()
    with local.run(checkpoint, older=True, startingPosition="now") as run:
        run.step()
        local.insert(4, 4)
        run.until(lambda rows: len(rows) == 4, "rows")
    assert [row["_change_type"] for row in checkpoint.rows] == ["snapshot"] * 3 + ["insert"]


def test_idle_query_gives_back_the_very_offset_at_which_it_began(local: LocalSource) -> None:
    """Spark compares offsets as text; a difference would give empty batches without end."""
    checkpoint = Checkpoint()
    with local.run(checkpoint, startingPosition="now", quietSeconds="1000000000") as run:
        assert run.step()
        assert not run.step()
    assert len(checkpoint.offsets) == 1
    local.wait_until_free()
    with local.run(checkpoint, older=True, startingPosition="snapshot", quietSeconds="1000000000") as run:
        assert not run.step()


def test_offsets_of_earlier_versions_go_by_the_option(local: LocalSource) -> None:
    local.provision()
    local.insert(1, 3)
    checkpoint = Checkpoint()
    with local.run(checkpoint, startingPosition="slot") as run:
        wait_for(lambda: run.step(keeps=False, commits=False), "first batch")
    del checkpoint.offsets[0]["begins"]
    local.wait_until_free()
    with local.run(checkpoint, startingPosition="slot") as run:
        run.until(lambda rows: rows, "rows of the first batch")
    assert ids(checkpoint) == [1, 2, 3]


def test_position_behind_ones_own_release_is_held_from_there_on(local: LocalSource) -> None:
    local.provision()
    start = local.position
    local.insert(1, 3)
    # Another consumer keeps the whole spool; this one has released all of it.
    release(local.spool, "other", Position.ZERO)
    with local.run(Checkpoint(), startingPosition="slot") as run:
        run.until(lambda rows: len(rows) == 3, "rows")
        reached = released_positions(local.spool)[CONSUMER]
        wait_for(lambda: run.step() or released_positions(local.spool)[CONSUMER] > reached, "release")
    local.wait_until_free()
    assert released_positions(local.spool)[CONSUMER] > start
    checkpoint = Checkpoint()
    with local.run(checkpoint, startingPosition=str(start)) as run:
        assert run.step()
        assert released_positions(local.spool)[CONSUMER] == Position.ZERO
        # The other consumer's release alone is not enough; the capture deletes and confirms what no consumer
        # needs.
        release(local.spool, "other", local.position)
        local.insert(4, 4)
        local.wait_for_spool(local.position)
        run.until(lambda rows: len(rows) == 4, "rows")
    assert ids(checkpoint) == [1, 2, 3, 4]


@pytest.mark.parametrize("before", [None, Position.of(0x100)])
def test_unavailable_position_leaves_no_claim_on_the_spool(
    local: LocalSource, before: Position | None
) -> None:
    local.provision()
    if before is not None:
        release(local.spool, CONSUMER, before)
    with local.run(startingPosition="0/10") as run, pytest.raises(PositionGapError):
        run.step()
    assert released_positions(local.spool) == ({} if before is None else {CONSUMER: before})


def test_restored_checkpoint_is_resumed_from_its_position(local: LocalSource) -> None:
    local.provision()
    checkpoint = Checkpoint()
    release(local.spool, "other", Position.ZERO)
    with local.run(checkpoint, startingPosition="slot") as run:
        local.insert(1, 3)
        run.until(lambda rows: len(rows) == 3, "rows")
        old = Checkpoint(list(checkpoint.offsets), checkpoint.commits, dict(checkpoint.kept))
        local.insert(4, 4)
        run.until(lambda rows: len(rows) == 4, "another row")
        local.insert(5, 5)
        run.until(lambda rows: len(rows) == 5, "one more")
    local.wait_until_free()
    stood = Position.parse(old.offsets[-1]["position"])
    assert released_positions(local.spool)[CONSUMER] > stood
    with local.run(old) as run:
        run.reader._running(stood)
        assert released_positions(local.spool)[CONSUMER] == stood
        run.until(lambda rows: len(rows) == 5, "rows again")
    assert ids(old) == [1, 2, 3, 4, 5]
