"""The steps of a decoder as rows that compare with the oracle's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from penstock.change import (
    METADATA_NAMES,
    ChangeBatch,
    ChangeCounts,
    LogicalMessage,
    LogStep,
    PiecesAborted,
    PiecesCommitted,
    TransactionPiece,
    Transactions,
    change_schema,
)
from penstock.position import Position
from penstock.schema import TableSchema
from tests.support.pgoutput_oracle import OracleRow, OracleTransaction

Placed = tuple[Any, Any, int, int, OracleRow]
"""Position, time, xid, ordinal, row."""


def expected(transactions: Iterable[OracleTransaction]) -> list[Placed]:
    placed = [(t.position, t.time, t.xid, row.ordinal, row) for t in transactions for row in t.rows]
    return sorted(placed, key=lambda entry: (entry[0], entry[3]))


@dataclass
class Decoded:
    """The steps of the log as decoded rows. Rows of streamed blocks have the values of their commit;
    rolled-back changes are removed.
    """

    rows: list[Placed] = field(default_factory=list)
    messages: list[LogicalMessage] = field(default_factory=list)
    loose: list[LogicalMessage] = field(default_factory=list)
    transactions: int = 0
    ends: list[Position] = field(default_factory=list)

    @classmethod
    def of(cls, steps: Iterable[LogStep], *, are_all_ended: bool = True) -> Decoded:
        """Checks the invariants of every batch."""
        found = cls()
        pieces: dict[int, tuple[list[Placed], list[LogicalMessage]]] = {}
        for step in steps:
            match step:
                case Transactions():
                    found.rows += step_rows(step)
                    found.messages += step.messages
                    found.transactions += step.count
                    found.ends.append(step.end)
                case TransactionPiece():
                    rows, messages = pieces.setdefault(step.xid, ([], []))
                    rows += step_rows(step)
                    messages += step.messages
                case PiecesAborted() if step.xid == step.subxid:
                    del pieces[step.xid]
                case PiecesAborted():
                    rows, messages = pieces[step.xid]
                    kept = (
                        [row for row in rows if row[2] != step.subxid],
                        [each for each in messages if each.xid != step.subxid],
                    )
                    pieces[step.xid] = kept
                case PiecesCommitted():
                    found._commit(step, *pieces.pop(step.xid))
                case LogicalMessage():
                    found.loose.append(step)
        assert not (pieces and are_all_ended)
        found.rows.sort(key=lambda entry: (entry[0], entry[3]))
        return found

    def _commit(self, step: PiecesCommitted, rows: list[Placed], messages: list[LogicalMessage]) -> None:
        assert all(row[:2] == (None, None) for row in rows)
        ordinals = [row[3] for row in rows]
        assert len(set(ordinals)) == len(ordinals)
        self.rows += [
            (step.end.value, step.commit_time, step.xid, ordinal, row) for _, _, _, ordinal, row in rows
        ]
        self.messages += [replace(message, xid=step.xid, position=step.end) for message in messages]
        self.transactions += 1
        self.ends.append(step.end)


def step_rows(step: Transactions | TransactionPiece) -> list[Placed]:
    return [row for batch in step.batches for row in batch_rows(batch)]


def batches(steps: Iterable[LogStep]) -> list[ChangeBatch]:
    return [
        batch for step in steps if isinstance(step, Transactions | TransactionPiece) for batch in step.batches
    ]


def batch_rows(batch: ChangeBatch) -> list[Placed]:
    rows = batch.rows
    rows.validate(full=True)
    assert rows.schema == change_schema(batch.table)
    assert rows.num_rows > 0
    plain = {name: _plain(rows.column(name), name) for name in rows.schema.names}
    order = list(zip((version or 0 for version in plain["_commit_version"]), plain["_ordinal"], strict=True))
    assert order == sorted(set(order))
    assert_counts(batch.counts, plain)
    assert {kind == "update_preimage" for kind in plain["_change_type"]} == {batch.is_old}
    return [
        _placed(batch.table, {name: values[at] for name, values in plain.items()})
        for at in range(rows.num_rows)
    ]


def _plain(column: pa.Array, name: str) -> list[Any]:
    if pa.types.is_temporal(column.type) and name not in METADATA_NAMES:
        return list(column.cast(pa.string()).to_pylist())
    return list(column.to_pylist())


def assert_counts(counts: ChangeCounts, plain: dict[str, list[Any]]) -> None:
    kinds = plain["_change_type"]
    names = ("insert", "update_postimage", "delete", "truncate", "update_preimage")
    counted = [counts.inserts, counts.updates, counts.deletes, counts.truncates, counts.preimages]
    assert counted == [kinds.count(name) for name in names]
    assert counts.unchanged == sum(value is not None for value in plain["_unchanged"])


def _placed(table: TableSchema, row: dict[str, Any]) -> Placed:
    values = {name: row[name] for name in table.column_names}
    unchanged = None if row["_unchanged"] is None else tuple(row["_unchanged"])
    exact = None if row["_exact"] is None else dict(row["_exact"])
    plain = OracleRow(table, row["_change_type"], row["_ordinal"], values, unchanged, exact)
    return row["_commit_version"], row["_commit_timestamp"], row["_xid"], row["_ordinal"], plain
