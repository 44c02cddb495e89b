"""Rows rejected by a Postgres target become dead letters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config.policies import RefusedPolicy
from penstock.errors import ValuesRefusedError
from penstock.pipeline.applier import EpochApplier
from penstock.pipeline.dead_letters.queue import DeadLetterQueue
from penstock.pipeline.dead_letters.store import DeadLetterStore
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.sinks.modes import Mode
from tests.support.contract.postgres_harness import PostgresHarness
from tests.support.contract.sink_harness import ITEMS
from tests.support.delta_tables import InlineExecutors
from tests.support.fix_postgres import Database
from tests.support.pipeline.epochs import open_epochs
from tests.support.sinks.source import Value


@pytest.fixture
def harness(shared_database: Database, tmp_path: Path) -> Iterator[PostgresHarness]:
    shared_database.execute("DROP SCHEMA IF EXISTS penstock, copy_public, mirror CASCADE")
    made = PostgresHarness(tmp_path, shared_database)
    made.copy()
    shared_database.execute(
        "ALTER TABLE copy_public.items ADD CONSTRAINT polite CHECK (note NOT LIKE 'bad%'), ALTER size "
        "SET NOT NULL"
    )
    yield made
    made.sink.close()


def open_applier(
    harness: PostgresHarness, root: Path, policy: RefusedPolicy
) -> tuple[EpochApplier, DeadLetterQueue]:
    (root / "lake").mkdir(exist_ok=True)
    store = DeadLetterStore(root / "lake", "shop")
    box = DeadLetterQueue(
        store,
        InlineExecutors(),
        policy_of=lambda _: policy,
        mode_of=lambda _: Mode.MIRROR,
        reject_inexact=False,
    )
    applier = open_epochs(harness.sink, root, pipeline="shop", dead_letters=box).applier
    target = harness.target()
    applier.tables.start(
        {ITEMS: target}, {ITEMS: TableStatus(TableState.CATCHING_UP, target.applied, target.applied)}
    )
    return applier, box


def shown(box: DeadLetterQueue) -> list[tuple[Any, ...]]:
    return [(each["key"], each["status"], each["code"]) for each in box.store.load().to_pylist()]


def test_C08_rows_rejected_by_a_constraint_of_the_target_are_dead_letters_and_a_replay_writes_them(
    harness: PostgresHarness, tmp_path: Path
) -> None:
    source, key = harness.source, lambda number: (Value(str(number)),)
    applier, box = open_applier(harness, tmp_path, RefusedPolicy.DEAD_LETTERS)
    for number in range(100, 140):
        source.insert(harness.item(number, "bad" if number % 10 == 3 else "fine", "1"))
    source.update(key(1), {"note": Value("better")})
    source.update(key(1), {"note": Value("bad again")})
    source.update(key(2), {"size": Value(None)})
    source.delete(key(3))
    applier.apply(harness.commit())
    refused = ['{"id":"103"}', '{"id":"113"}', '{"id":"123"}', '{"id":"133"}', '{"id":"1"}', '{"id":"2"}']
    assert shown(box) == [(name, "open", "PEN-3005") for name in refused]
    reasons = {each["reason"] for each in box.store.load().to_pylist()}
    assert any("'polite'" in reason for reason in reasons)
    rows: dict[int, str] = dict(harness.database.query("SELECT id::int, note FROM copy_public.items"))
    assert len(rows) == 9 - 1 + 40 - 4
    assert (rows[1], rows[2]) == ("better", "note 2"), "the change before the one that was refused"

    source.delete(key(133))
    applier.apply(harness.commit())
    harness.database.execute("ALTER TABLE copy_public.items DROP CONSTRAINT polite")
    box.order_replay(ITEMS)
    source.insert(harness.item(500, "fine", "1"))
    applier.apply(harness.commit())
    assert dict.fromkeys(status for _, status, _ in shown(box)) == {
        "replayed": None,
        "superseded": None,
        "open": None,
    }
    assert [name for name, status, _ in shown(box) if status == "open"] == ['{"id":"2"}'], (
        "its size is still refused"
    )
    harness.database.execute("ALTER TABLE copy_public.items ALTER size DROP NOT NULL")
    box.order_replay(ITEMS)
    source.insert(harness.item(501, "fine", "1"))
    applier.apply(harness.commit())
    assert harness.rows() == source.sorted_rows()


def test_by_default_a_constraint_of_the_target_stops_the_table(
    harness: PostgresHarness, tmp_path: Path
) -> None:
    applier, box = open_applier(harness, tmp_path, RefusedPolicy.STOP)
    harness.source.insert(harness.item(100, "bad", "1"))
    applier.apply(harness.commit())
    assert "PEN-3005" in (applier.tables.statuses[ITEMS].reason or "")
    assert shown(box) == []


DEFERRED = """
    CREATE SCHEMA mirror;
    CREATE TABLE mirror.notes (note text PRIMARY KEY);
    INSERT INTO mirror.notes SELECT note FROM copy_public.items UNION SELECT unnest('{fine,better}'::text[]);
    ALTER TABLE copy_public.items DROP CONSTRAINT polite, ALTER size DROP NOT NULL,
        ADD CONSTRAINT known FOREIGN KEY (note) REFERENCES mirror.notes DEFERRABLE INITIALLY DEFERRED,
        ADD CONSTRAINT single UNIQUE (size) DEFERRABLE INITIALLY DEFERRED;
    CREATE TABLE mirror.wishes (item bigint REFERENCES copy_public.items (id) DEFERRABLE INITIALLY DEFERRED);
    INSERT INTO mirror.wishes VALUES (1), (5)
"""


def test_C08_deferred_constraints_reject_exactly_the_rows_that_break_them(
    harness: PostgresHarness, tmp_path: Path
) -> None:
    """Updated rows are deleted and inserted again, even if other rows reference them; two rows swap values
    under a unique constraint.
    """
    source, key = harness.source, lambda number: (Value(str(number)),)
    harness.database.execute(DEFERRED)
    applier, box = open_applier(harness, tmp_path, RefusedPolicy.DEAD_LETTERS)
    for number in range(100, 116):
        source.insert(harness.item(number, "unheard of" if number % 8 == 3 else "fine", f"{number}.50"))
    source.insert(harness.item(120, "fine", "9.50"))  # the value of another row
    for number in range(130, 146, 2):  # the last change supplies a value that one of them needs
        source.insert(harness.item(number, "fine", f"{3 if number == 136 else number}.50"))
        source.insert(harness.item(number + 1, "unheard of", f"{number + 1}.50"))
    source.update(key(1), {"size": Value("2.50")})
    source.update(key(2), {"size": Value("1.50")})
    source.update(key(5), {"note": Value("better")})
    source.update(key(3), {"size": Value("300.50")})
    applier.apply(harness.commit())
    assert applier.tables.statuses[ITEMS].reason is None
    assert [name for name, _, _ in shown(box)] == [
        f'{{"id":"{number}"}}' for number in (107, 115, 120, *range(131, 147, 2))
    ]
    reasons = [each["reason"] for each in box.store.load().to_pylist()]
    assert [re.findall("'(.*?)'", reason) for reason in reasons] == [
        ["known"],
        ["known"],
        ["single"],
        *[["known"]] * 8,
    ]
    found: dict[int, str] = dict(
        harness.database.query("SELECT id::int, size::text || ' ' || note FROM copy_public.items")
    )
    assert len(found) == 9 + 16 - 2 + 8
    assert [found[number] for number in (1, 2, 3, 5, 136)] == [
        "2.50 note 1",
        "1.50 note 2",
        "300.50 note 3",
        "5.50 better",
        "3.50 fine",
    ]

    # A delete cannot become a dead letter: the table fails.
    source.delete(key(1))
    applier.apply(harness.commit())
    assert "PEN-3005" in (applier.tables.statuses[ITEMS].reason or "")


def test_a_deferred_constraint_stops_a_copy_at_its_commit_and_leaves_the_table_as_it_was(
    harness: PostgresHarness,
) -> None:
    harness.database.execute(DEFERRED)
    before = harness.rows()
    rows = [*harness.source.states[harness.source.fence], harness.item(50, "unheard of", "50.50")]
    file, _ = harness.write(harness.begin(), 0, rows)
    with pytest.raises(ValuesRefusedError, match="23503"):
        harness.sink.finish_snapshot(harness.table, [file], harness.fence)
    assert harness.rows() == before
