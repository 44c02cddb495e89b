"""A full disk, simulated by the limit on file size: the system refuses the write, and files are left half
written.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.change import LogStep, TransactionPiece, Transactions
from penstock.errors import Recovery, SpoolFullError
from penstock.spool import SpoolReader, SpoolWriter
from tests.support.spool.builders import ORDERS, Commit, all_changes, at, batch, capture, committed, time_of

ROWS = 20_000


@contextmanager
def no_room() -> Iterator[None]:
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))


WHOLE: list[LogStep] = [
    Transactions((batch(ORDERS, [(20, at) for at in range(ROWS)]),), at(20), time_of(20), 1)
]
PIECES: list[LogStep] = [
    TransactionPiece(7, (batch(ORDERS, [(None, at) for at in range(ROWS)]),)),
    committed(7, 20),
]


def write(writer: SpoolWriter, steps: list[LogStep]) -> None:
    for step in steps:
        writer.append(step)
    writer.seal()


@pytest.mark.parametrize("steps", [WHOLE, PIECES], ids=["whole", "pieces"])
def test_a_full_disk_is_named_with_its_remedy_and_nothing_is_lost(
    tmp_path: Path, steps: list[LogStep]
) -> None:
    capture(tmp_path, 0, [[Commit(10)]])
    writer = SpoolWriter(tmp_path, at(10), piece_buffer_bytes=0)
    with no_room(), pytest.raises(SpoolFullError) as caught:
        write(writer, steps)
    assert caught.value.recovery is Recovery.OPERATOR
    assert caught.value.hint is not None
    assert str(tmp_path) in caught.value.hint
    writer.close()
    assert all_changes(tmp_path) == Counter(Commit(10).seen())

    write(SpoolWriter(tmp_path, at(10), piece_buffer_bytes=0), steps)
    assert len(all_changes(tmp_path)) == 1 + ROWS
    assert SpoolReader(tmp_path).end == at(20)
