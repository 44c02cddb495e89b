"""Two-phase commit: a prepared transaction is captured when it commits; a slot that would send it earlier is
refused.
"""

from __future__ import annotations

import pytest

from penstock.errors import SlotTwoPhaseError
from penstock.position import Position
from tests.support.transactions.source import TransactionSource
from tests.support.waiting import DEADLINE_SECONDS

FILL = "INSERT INTO public.t SELECT i, 'n' || i FROM generate_series({}, {}) i"


@pytest.mark.versions(14, 18)
def test_X04_a_prepared_transaction_arrives_whole_when_it_commits_also_after_a_restart(
    source: TransactionSource,
) -> None:
    name = source.database.name
    with source.capture() as capture:
        for part, (low, high) in enumerate(((1, 10), (101, 3000), (5001, 8000))):
            with source.database.transaction():
                source.database.execute(FILL.format(low, high))
                source.database.execute(f"PREPARE TRANSACTION '{name} {part}'")
        source.database.execute(FILL.format(20, 21))
        source.catch_up(capture)
        assert [row["id"] for row in source.changes("t")] == [20, 21]
    with source.capture() as capture:
        source.database.execute(f"COMMIT PREPARED '{name} 1'")
        source.catch_up(capture)
        source.database.execute(f"ROLLBACK PREPARED '{name} 2'")
        source.database.execute(f"COMMIT PREPARED '{name} 0'")
        source.catch_up(capture)
    assert [row["id"] for row in source.changes("t")] == [20, 21, *range(101, 3001), *range(1, 11)]
    assert source.left_over == []


@pytest.mark.versions(14, 18)
def test_X04_a_two_phase_slot_is_refused_before_a_row_of_it_is_lost(source: TransactionSource) -> None:
    name = source.database.name
    source.database.execute("SELECT pg_drop_replication_slot(%s)", source.slot)
    source.database.execute(
        "SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, true)", source.slot
    )
    with source.database.transaction():
        source.database.execute(FILL.format(1, 10))
        source.database.execute(f"PREPARE TRANSACTION '{name}'")
    source.database.execute(f"COMMIT PREPARED '{name}'")
    with source.capture() as capture, pytest.raises(SlotTwoPhaseError, match="two_phase"):
        capture.wait_until(Position.of((1 << 64) - 1), DEADLINE_SECONDS)
