"""The changes of one look as steps of the log: one transaction, whole in memory if it is small, in pieces on disk if it is not.

Some changes may stand at an earlier place than the look's own: these are transactions of their own, and come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

import pyarrow as pa

from penstock.change import ChangeBatch, ChangeType, LogStep, PiecesCommitted, TransactionPiece, Transactions
from penstock.position import Position
from penstock.postgres.changed_rows import Place, change_batch, truncate_batch
from penstock.schema import TableSchema

_PIECE_BYTES = 16 << 20
_XID = 1
"""Under which pieces lie in the spool until they are whole; those at earlier places, under the numbers that follow. A look is of many
transactions of the source, or of none."""


class LookSteps:
    """Rows go in, steps come out; the last of them with `finish`."""

    def __init__(self, position: Position, time: datetime, xid: int = _XID) -> None:
        self.is_due = False
        """Whether there is a last step although there was no row: what the look's mark says must not be lost."""
        self._position = position
        self._time = time
        self._xid = xid
        self._earlier: dict[Position, LookSteps] = {}
        self._own_rows = 0
        self._batches: list[ChangeBatch] = []
        self._bytes = 0
        self._is_in_pieces = False

    @property
    def rows(self) -> int:
        """At all places."""
        return self._own_rows + sum(steps.rows for steps in self._earlier.values())

    def at(self, position: Position) -> LookSteps:
        """For changes that stand there, after the look before and before this one. `finish` gives these too."""
        return self._earlier.setdefault(position, LookSteps(position, self._time, self._xid + 1 + len(self._earlier)))

    def add(self, schema: TableSchema, kind: ChangeType, texts: Sequence[pa.StringArray]) -> Iterator[LogStep]:
        return self._add(change_batch(schema, kind, texts, self._place))

    def truncate(self, schema: TableSchema) -> Iterator[LogStep]:
        return self._add(truncate_batch(schema, self._place))

    @property
    def has_end(self) -> bool:
        """Whether `finish` gives a step, which ends where the look does."""
        return self.rows > 0 or self.is_due

    def finish(self) -> Iterator[LogStep]:
        """Nothing, if there was no row and none is due."""
        for position in sorted(self._earlier):
            yield from self._earlier[position].finish()
        if self._is_in_pieces:
            yield from self._piece()
            yield PiecesCommitted(self._xid, self._position, self._time)
        elif self.has_end:
            yield Transactions(tuple(self._batches), self._position, self._time, 1 if self._batches else 0)

    @property
    def _place(self) -> Place:
        return Place(self._position, self._time, self._own_rows)

    def _add(self, batch: ChangeBatch) -> Iterator[LogStep]:
        self._batches.append(batch)
        self._own_rows += batch.rows.num_rows
        self._bytes += batch.rows.nbytes
        if self._bytes > _PIECE_BYTES:
            self._is_in_pieces = True
            yield from self._piece()

    def _piece(self) -> Iterator[LogStep]:
        if self._batches:
            yield TransactionPiece(self._xid, tuple(self._batches))
            self._batches, self._bytes = [], 0
