"""The vectorised decoder against the scalar one, over random streams and damaged ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    LogStep,
    PiecesCommitted,
    TransactionPiece,
    Transactions,
    change_schema,
)
from penstock.errors import ProtocolError
from penstock.position import Position
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from penstock.schema import TableSchema
from tests.pgoutput_oracle import Oracle, OracleRow, OracleTransaction
from tests.pgoutput_streams import StreamWriter, split

Placed = tuple[Any, Any, int, int, OracleRow]
"""Position, time, xid, ordinal, row."""

seeds = st.integers(0, 2**32)
transaction_sizes = st.lists(st.integers(0, 30), min_size=1, max_size=12)


def write(seed: int, table_count: int, sizes: Sequence[int]) -> StreamWriter:
    writer = StreamWriter.start(seed, table_count)
    for size in sizes:
        writer.transaction(size)
    return writer


def expected(transactions: Iterable[OracleTransaction]) -> list[Placed]:
    placed = [(t.position, t.time, t.xid, row.ordinal, row) for t in transactions for row in t.rows]
    return sorted(placed, key=lambda entry: (entry[0], entry[3]))


def decoded(steps: Iterable[LogStep]) -> list[Placed]:
    """All rows of the steps, with what a piece learns from its commit filled in; checks what every batch promises on the way."""
    placed: list[Placed] = []
    pieces: list[Placed] = []
    for step in steps:
        match step:
            case Transactions():
                assert not pieces
                placed += [row for batch in step.batches for row in batch_rows(batch)]
            case TransactionPiece():
                rows = [row for batch in step.batches for row in batch_rows(batch)]
                assert all(row[:3] == (None, None, step.xid) for row in rows)
                pieces += rows
            case PiecesCommitted():
                placed += [(step.end.value, step.commit_time, step.xid, ordinal, row) for _, _, _, ordinal, row in pieces]
                pieces = []
    return sorted(placed, key=lambda entry: (entry[0], entry[3]))


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


@given(seeds, st.integers(1, 4), transaction_sizes, st.integers(1, 8), st.sampled_from([1, 5, 40, 50_000]))
@settings(max_examples=200, deadline=None)
def test_any_stream_cut_anywhere_decodes_as_the_oracle_does(
    seed: int, table_count: int, sizes: list[int], call_count: int, max_open: int
) -> None:
    writer = write(seed, table_count, sizes)
    decoder = PgOutputDecoder(writer.keys, max_open_messages=max_open)
    steps = [step for call in split(Random(seed), writer.messages, call_count) for step in decoder.decode(call)]
    transactions = Oracle(writer.keys).decode(writer.messages)
    assert decoded(steps) == expected(transactions)
    assert sum(batch.counts.moves for batch in batches(steps)) == sum(transaction.moves for transaction in transactions)
    assert sum(step.count if isinstance(step, Transactions) else isinstance(step, PiecesCommitted) for step in steps) == len(sizes)
    ends = [step.end for step in steps if isinstance(step, Transactions | PiecesCommitted)]
    assert ends == sorted(ends)
    assert ends[-1] == Position.of(transactions[-1].position)
    assert not decoder.has_open_transaction
    assert decoder.carried_bytes == 0


@given(seeds, st.integers(1, 3), transaction_sizes, st.lists(st.integers(0, 2**32), min_size=1, max_size=3))
@settings(max_examples=400, deadline=None)
def test_damaged_bytes_are_refused_or_decode_as_the_oracle_does(seed: int, table_count: int, sizes: list[int], damages: list[int]) -> None:
    writer = write(seed, table_count, sizes)
    messages = list(writer.messages)
    for damage in damages:
        random = Random(damage)
        at = random.randrange(len(messages))
        messages[at] = damaged(random, messages[at])
    try:
        transactions = Oracle(writer.keys).decode(messages)
    except ProtocolError:
        with pytest.raises(ProtocolError):
            PgOutputDecoder(writer.keys).decode(messages)
    else:
        assert decoded(PgOutputDecoder(writer.keys).decode(messages)) == expected(transactions)


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
