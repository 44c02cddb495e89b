"""The vectorised decoder against the scalar one, over random streams and damaged ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from penstock.errors import ProtocolError, SlotForeignError
from penstock.position import Position
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from penstock.schema import TableSchema
from tests.pgoutput_oracle import Oracle, OracleRow, OracleTransaction
from tests.pgoutput_streams import PREFIXES, StreamWriter, split

Placed = tuple[Any, Any, int, int, OracleRow]
"""Position, time, xid, ordinal, row."""

WANTED = frozenset(PREFIXES[:2])


@dataclass(frozen=True)
class Shape:
    """Of a random stream: how many changes each transaction or block of one has."""

    seed: int
    table_count: int
    sizes: list[int]


shapes = st.builds(Shape, st.integers(0, 2**32), st.integers(1, 4), st.lists(st.integers(0, 30), min_size=1, max_size=12))


def write(shape: Shape, *, streaming: bool) -> StreamWriter:
    """With `streaming`, about half of the transactions are sent while they are open."""
    writer = StreamWriter.start(shape.seed, shape.table_count)
    for size in shape.sizes:
        if streaming and writer.random.random() < 0.6:
            writer.block(size)
        else:
            writer.transaction(size)
    writer.finish()
    return writer


def expected(transactions: Iterable[OracleTransaction]) -> list[Placed]:
    placed = [(t.position, t.time, t.xid, row.ordinal, row) for t in transactions for row in t.rows]
    return sorted(placed, key=lambda entry: (entry[0], entry[3]))


@dataclass
class Decoded:
    """What the steps of the log come to, with what a piece learns from its commit filled in, and what was rolled back left out."""

    rows: list[Placed] = field(default_factory=list)
    messages: list[LogicalMessage] = field(default_factory=list)
    loose: list[LogicalMessage] = field(default_factory=list)
    transactions: int = 0
    ends: list[Position] = field(default_factory=list)

    @classmethod
    def of(cls, steps: Iterable[LogStep], *, are_all_ended: bool = True) -> Decoded:
        """Checks what every batch promises on the way."""
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
                    kept = [row for row in rows if row[2] != step.subxid], [each for each in messages if each.xid != step.subxid]
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
        self.rows += [(step.end.value, step.commit_time, step.xid, ordinal, row) for _, _, _, ordinal, row in rows]
        self.messages += [replace(message, xid=step.xid, position=step.end) for message in messages]
        self.transactions += 1
        self.ends.append(step.end)


def step_rows(step: Transactions | TransactionPiece) -> list[Placed]:
    return [row for batch in step.batches for row in batch_rows(batch)]


def batches(steps: Iterable[LogStep]) -> list[ChangeBatch]:
    return [batch for step in steps if isinstance(step, Transactions | TransactionPiece) for batch in step.batches]


def batch_rows(batch: ChangeBatch) -> list[Placed]:
    rows = batch.rows
    rows.validate(full=True)
    assert rows.schema == change_schema(batch.table)
    assert rows.num_rows > 0
    plain = {name: _plain(rows.column(name), name) for name in rows.schema.names}
    order = list(zip((version or 0 for version in plain["_commit_version"]), plain["_ordinal"], strict=True))
    assert order == sorted(set(order))
    assert_counts(batch.counts, plain)
    return [_placed(batch.table, {name: values[at] for name, values in plain.items()}) for at in range(rows.num_rows)]


def _plain(column: pa.Array, name: str) -> list[Any]:
    if pa.types.is_temporal(column.type) and name not in METADATA_NAMES:
        return list(column.cast(pa.string()).to_pylist())
    return list(column.to_pylist())


def assert_counts(counts: ChangeCounts, plain: dict[str, list[Any]]) -> None:
    kinds = plain["_change_type"]
    names = ("insert", "update_postimage", "delete", "truncate")
    assert [counts.inserts, counts.updates, counts.deletes, counts.truncates] == [kinds.count(name) for name in names]
    assert counts.unchanged == sum(value is not None for value in plain["_unchanged"])


def _placed(table: TableSchema, row: dict[str, Any]) -> Placed:
    values = {name: row[name] for name in table.column_names}
    unchanged = None if row["_unchanged"] is None else tuple(row["_unchanged"])
    exact = None if row["_exact"] is None else dict(row["_exact"])
    plain = OracleRow(table, row["_change_type"], row["_ordinal"], values, unchanged, exact)
    return row["_commit_version"], row["_commit_timestamp"], row["_xid"], row["_ordinal"], plain


@given(shapes, st.booleans(), st.integers(1, 8), st.sampled_from([1, 5, 40, 50_000]))
@settings(max_examples=200, deadline=None)
def test_X03_any_stream_cut_anywhere_decodes_as_the_oracle_does(shape: Shape, streaming: bool, call_count: int, max_open: int) -> None:
    writer = write(shape, streaming=streaming)
    decoder = PgOutputDecoder(writer.keys, prefixes=WANTED, max_open_messages=max_open)
    steps = [step for call in split(Random(shape.seed), writer.messages, call_count) for step in decoder.decode(call)]
    oracle = Oracle(writer.keys, WANTED)
    transactions = oracle.decode(writer.messages)
    found = Decoded.of(steps)
    assert found.rows == expected(transactions)
    assert found.messages == [message for transaction in transactions for message in transaction.messages]
    assert found.loose == oracle.messages
    assert found.transactions == len(transactions) == writer.ended
    assert found.ends == sorted(set(found.ends))
    assert found.ends[-1:] == [Position.of(transaction.position) for transaction in transactions[-1:]]
    if not streaming:
        assert sum(batch.counts.moves for batch in batches(steps)) == sum(transaction.moves for transaction in transactions)
    assert not decoder.has_open_transaction
    assert decoder.carried_bytes == 0


@given(shapes, st.booleans(), st.booleans(), st.lists(st.integers(0, 2**32), min_size=1, max_size=3))
@settings(max_examples=400, deadline=None)
def test_damaged_bytes_are_refused_or_decode_as_the_oracle_does(shape: Shape, streaming: bool, asks: bool, damages: list[int]) -> None:
    writer = write(shape, streaming=streaming)
    messages = list(writer.messages)
    prefixes = WANTED if asks else frozenset()
    for damage in damages:
        random = Random(damage)
        at = random.randrange(len(messages))
        messages[at] = damaged(random, messages[at])
    decoder = PgOutputDecoder(writer.keys, prefixes=prefixes)
    oracle = Oracle(writer.keys, prefixes)
    try:
        transactions = oracle.decode(messages)
    except ProtocolError:
        with pytest.raises((ProtocolError, SlotForeignError)):
            decoder.decode(messages)
    else:
        found = Decoded.of(decoder.decode(messages), are_all_ended=False)
        assert found.rows == expected(transactions)
        assert found.messages == [message for transaction in transactions for message in transaction.messages]
        assert found.loose == oracle.messages


def damaged(random: Random, message: bytes) -> bytes:
    at = random.randrange(len(message) + 1)
    match random.randrange(5):
        case 0:
            return message[:at]
        case 1:
            return message + random.randbytes(random.randrange(1, 9))
        case 2:
            return message[:at] + bytes([random.randrange(256)]) + message[at + 1 :]
        case 3:
            return message[:at] + random.choice([b"\xff", b"\0", b"n", b"t", b"u", b"N", b"\x80"]) + message[at + 1 :]
        case _:
            return message[:at] + random.randbytes(random.randrange(1, 5)) + message[at:]
