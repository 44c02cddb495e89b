"""Random histories in every table mode, through a real spool into a real Postgres: each epoch equals the
model.
"""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.change import EXACT
from penstock.schema import Column, TableSchema
from penstock.sinks.modes import Mode
from tests.support.contract.postgres_copy import TABLE, Copy, at_fence
from tests.support.fix_postgres import Database
from tests.support.property.source_model import Heap, SourceModel, canonical
from tests.support.sinks.history import KEYS, History
from tests.support.sinks.source import Row, Value, whole

KEYLESS = TableSchema(
    16402, TABLE.name, (Column("a", pa.string(), 114), Column("b", pa.string(), 1042, 9)), ()
)


@pytest.fixture
def fresh_database(shared_database: Database) -> Database:
    shared_database.execute('DROP SCHEMA IF EXISTS penstock, "copy_odd. schema" CASCADE')
    return shared_database


@pytest.mark.parametrize("mode", [Mode.MIRROR, Mode.SOFT_DELETE, Mode.HISTORY])
@pytest.mark.parametrize("seed", range(3))
def test_after_every_epoch_the_table_equals_the_model(
    fresh_database: Database, tmp_path: Path, mode: Mode, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sinks.slice_reader.ROWS_A_TASK", (500_000, 40, 7)[seed])
    monkeypatch.setitem(KEYS, TABLE, lambda at: (Value(f"{at // 7}\t"), Value(f"k{at % 7}\\")))
    history = History(TABLE, seed, groups=2, source=SourceModel)
    history.statements = 25
    history.run(6, truncates=0.3 if seed % 2 else 0.0)
    source = history.source
    assert isinstance(source, SourceModel)
    copy = Copy(tmp_path, fresh_database, TABLE, mode)
    copy.copy(source.states[source.fence], source.fence)
    for steps in history.steps():
        copy.spool(steps)
        end = copy.reader.end
        assert end is not None
        copy.follow(end.value)
        expected = [at_fence(row, source.fence) for row in source.expected(mode, end.value)]
        assert canonical(copy.rows(source.fence), copy.layout) == canonical(expected, copy.layout)
    copy.sink.close()


def test_a_key_with_another_text_is_deleted_before_it_is_inserted(
    fresh_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server considers 1.0 and 1.00 one key, the fold considers them two; both must be in the same part
    of an epoch.
    """
    monkeypatch.setattr("penstock.sinks.slice_reader.ROWS_A_TASK", 4)
    table = TableSchema(
        16403, TABLE.name, (Column("k", pa.string(), 1700), Column("note", pa.string(), 25)), ("k",)
    )
    source = SourceModel(table, [{"k": Value(f"{number}.0"), "note": Value("old")} for number in range(20)])
    copy = Copy(tmp_path, fresh_database, table, Mode.MIRROR)
    copy.copy(source.states[source.fence], source.fence)
    source.insert(
        {"k": Value("100"), "note": Value("first")}
    )  # so that pairs of keys are distributed over parts in any order
    for number in range(20):
        source.update((Value(f"{number}.0"),), {"k": Value(f"{number}.00")})
    end = source.commit()
    copy.spool([whole(table, source.log)])
    copy.follow(end)
    assert canonical(copy.rows(source.fence), copy.layout) == canonical(
        source.expected(Mode.MIRROR, end), copy.layout
    )
    copy.sink.close()


def test_R05_of_equal_rows_without_key_as_many_go_as_the_source_deletes(
    fresh_database: Database, tmp_path: Path
) -> None:
    """One column type has no equality operator, the other has one that ignores blanks."""
    draw = random.Random(4)

    def row() -> Row:
        return {
            "a": Value(draw.choice([None, '{"x": 1}', "{}"])),
            "b": Value(draw.choice([None, "a    ", "     "])),
        }

    heap = Heap(KEYLESS, [row() for _ in range(12)])
    copy = Copy(tmp_path, fresh_database, KEYLESS, Mode.MIRROR)
    copy.copy(heap.rows, heap.fence)
    for _ in range(4):
        for _ in range(6):
            heap.insert(row()) if not heap.rows or draw.random() < 0.4 else heap.delete(
                draw.randrange(len(heap.rows))
            )
        heap.commit()
        copy.spool([whole(KEYLESS, heap.log[-1:])])
        copy.follow(heap.position)
        assert canonical(copy.rows(heap.fence), copy.layout) == canonical(
            heap.expected(heap.position), copy.layout
        )
    copy.sink.close()


def test_K15_a_log_has_the_snapshot_and_then_every_change_in_order(
    fresh_database: Database, tmp_path: Path
) -> None:
    heap = Heap(KEYLESS, [{"a": Value("{}"), "b": Value("x    ")}])
    copy = Copy(tmp_path, fresh_database, KEYLESS, Mode.APPEND)
    copy.copy(heap.rows, heap.fence)
    heap.update(0, {"a": Value("1"), "b": Value(None)})
    heap.truncate()
    heap.commit()
    copy.spool([whole(KEYLESS, heap.log)])
    copy.follow(heap.position)
    found = sorted(copy.rows(heap.fence), key=lambda row: (row["_commit_version"], row["_ordinal"]))
    shown = [(row["_change_type"], row["a"], row["b"], row["_commit_version"], row[EXACT]) for row in found]
    assert shown == [
        ("snapshot", "{}", "x    ", 100, None),
        ("delete", "{}", "x    ", 110, None),
        ("insert", "1", None, 110, None),
        ("truncate", None, None, 110, None),
    ]
    copy.sink.close()
