from __future__ import annotations

import pytest

from penstock.position import Position
from penstock.sinks.base import TableChanges
from penstock.spool import SpoolReader, SpoolWriter
from tests.support.sinks.history import PLAIN, History


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> TableChanges:
    """Spooled changes of one table. Some transactions are spooled in several steps."""
    history = History(PLAIN, 5, groups=20)
    history.run(20, truncates=0.1)
    root = tmp_path_factory.mktemp("spool")
    writer = SpoolWriter(root, Position.of(history.source.fence))
    for steps in history.steps():
        for step in steps:
            writer.append(step)
        writer.seal()
    found = (
        SpoolReader(root)
        .read(Position.of(history.source.fence), Position.of(history.source.position))
        .tables[PLAIN.name]
    )
    return TableChanges(PLAIN.name, found.slices, found.counts)
