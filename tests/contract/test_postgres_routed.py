"""Several tables that go into one table of a Postgres target, in every mode, by random histories."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from penstock.position import Position
from penstock.sinks.layout import Mode
from tests.contract.test_postgres_modes import TABLE, Copy, at_fence
from tests.fix_postgres import Database
from tests.integration.sinks.history import KEYS, History
from tests.integration.sinks.source import Value
from tests.property.chronicle import Chronicle, canonical
from tests.property.routed import FENCE, SOURCE, Shards


@pytest.mark.parametrize("mode", [Mode.MIRROR, Mode.SOFT_DELETE, Mode.HISTORY])
def test_K11_after_every_epoch_the_table_has_what_each_table_has(
    shared_database: Database, tmp_path: Path, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_database.execute("DROP SCHEMA IF EXISTS penstock, copy_lake CASCADE")
    monkeypatch.setattr("penstock.sinks.postgres_sink._ROWS_A_PART", 7)
    monkeypatch.setitem(KEYS, TABLE, lambda at: (Value(f"{at // 7}\t"), Value(f"k{at % 7}\\")))
    members = []
    for seed in range(3):
        history = History(TABLE, seed, groups=2, source=Chronicle)
        history.statements = 25
        history.run(5, truncates=0.0 if seed == 1 else 0.5)
        assert isinstance(history.source, Chronicle)
        members.append(history.source)
    shards = Shards(TABLE, [member.log for member in members], lambda at, position: members[at].expected(mode, position))
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
        copy.sink.apply(target, changes, Position.of(high))  # a repetition changes nothing
        expected = [at_fence(row, FENCE) for row in shards.expected(high)]
        assert canonical(copy.rows(FENCE), copy.layout) == canonical(expected, copy.layout)
    copy.sink.close()
