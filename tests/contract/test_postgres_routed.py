"""Several tables routed into one table of a Postgres target, in every table mode, by random histories."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.position import Position
from penstock.schema import Column, TableSchema
from penstock.sinks.modes import Mode
from tests.support.contract.postgres_copy import TABLE, Copy, at_fence
from tests.support.fix_postgres import Database
from tests.support.property.routed import FENCE, SOURCE, Shards
from tests.support.property.source_model import SourceModel, canonical
from tests.support.sinks.history import KEYS, History
from tests.support.sinks.source import Value


@pytest.mark.parametrize("mode", [Mode.MIRROR, Mode.SOFT_DELETE, Mode.HISTORY])
def test_K11_after_every_epoch_the_table_has_the_rows_of_each_member(
    shared_database: Database, tmp_path: Path, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_database.execute("DROP SCHEMA IF EXISTS penstock, copy_lake CASCADE")
    monkeypatch.setattr("penstock.sinks.slice_reader.ROWS_A_TASK", 7)
    monkeypatch.setitem(KEYS, TABLE, lambda at: (Value(f"{at // 7}\t"), Value(f"k{at % 7}\\")))
    members = []
    for seed in range(3):
        history = History(TABLE, seed, groups=2, source=SourceModel)
        history.statements = 25
        history.run(5, truncates=0.0 if seed == 1 else 0.5)
        assert isinstance(history.source, SourceModel)
        members.append(history.source)
    shards = Shards(
        TABLE, [member.log for member in members], lambda at, position: members[at].expected(mode, position)
    )
    copy = Copy(tmp_path, shared_database, shards.schema, mode)
    named = [(str(schema.name), member) for schema, member in zip(shards.members, members, strict=True)]
    copy.copy([{**row, SOURCE: Value(name)} for name, member in named for row in member.states[FENCE]], FENCE)
    for low, high in pairwise([FENCE, *shards.positions[1::2], shards.positions[-1]]):
        copy.spool([shards.step(low, high)])
        target = copy.sink.load_target(shards.schema.name)
        assert target is not None
        changes = shards.changes(target, copy.reader, low, high)
        assert changes is not None
        copy.sink.apply(target, changes, Position.of(high))
        copy.sink.apply(target, changes, Position.of(high))  # repeating the epoch changes nothing
        expected = [at_fence(row, FENCE) for row in shards.expected(high)]
        assert canonical(copy.rows(FENCE), copy.layout) == canonical(expected, copy.layout)
    copy.sink.close()


def test_rows_after_a_truncate_stay_in_an_epoch_of_any_length(
    shared_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the epoch must not treat rows written by another part as existing rows."""
    shared_database.execute("DROP SCHEMA IF EXISTS penstock, copy_lake CASCADE")
    monkeypatch.setattr("penstock.sinks.slice_reader.ROWS_A_TASK", 4)
    table = TableSchema(
        1, TABLE.name, (Column("k", pa.string(), 23), Column("note", pa.string(), 25)), ("k",)
    )
    members = [
        SourceModel(table, [{"k": Value(str(number)), "note": Value("old")} for number in range(20)])
        for _ in range(2)
    ]
    members[0].truncate()
    for number in range(15):
        members[0].insert({"k": Value(str(number)), "note": Value("new")})
    members[0].commit()
    shards = Shards(
        table,
        [member.log for member in members],
        lambda at, position: members[at].expected(Mode.MIRROR, position),
    )
    copy = Copy(tmp_path, shared_database, shards.schema, Mode.MIRROR)
    copy.copy(
        [
            {**row, SOURCE: Value(f"s{at}.t")}
            for at, member in enumerate(members)
            for row in member.states[FENCE]
        ],
        FENCE,
    )
    (end,) = shards.positions
    copy.spool([shards.step(FENCE, end)])
    target = copy.sink.load_target(shards.schema.name)
    assert target is not None
    changes = shards.changes(target, copy.reader, FENCE, end)
    assert changes is not None
    copy.sink.apply(target, changes, Position.of(end))
    assert canonical(copy.rows(FENCE), copy.layout) == canonical(shards.expected(end), copy.layout)
    copy.sink.close()
