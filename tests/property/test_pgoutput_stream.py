"""The vectorised decoder against the scalar one, over valid and damaged random streams."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ProtocolError, SlotTwoPhaseError
from penstock.position import Position
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from tests.support.pgoutput_decoded import Decoded, batches, expected
from tests.support.pgoutput_oracle import Oracle
from tests.support.pgoutput_streams import PREFIXES, StreamWriter, split
from tests.support.rounds import rounds

WANTED = frozenset(PREFIXES[:2])


@dataclass(frozen=True)
class Shape:
    """Parameters of a random stream: the number of changes in each transaction or block."""

    seed: int
    table_count: int
    sizes: list[int]


shapes = st.builds(
    Shape, st.integers(0, 2**32), st.integers(1, 4), st.lists(st.integers(0, 30), min_size=1, max_size=12)
)


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


@given(shapes, st.booleans(), st.integers(1, 8), st.sampled_from([1, 5, 40, 50_000]), st.booleans())
@settings(max_examples=rounds(100), deadline=None)
def test_X03_any_stream_cut_anywhere_decodes_as_the_oracle_does(
    shape: Shape, streaming: bool, call_count: int, max_open: int, old_rows: bool
) -> None:
    writer = write(shape, streaming=streaming)
    decoder = PgOutputDecoder(writer.keys, prefixes=WANTED, old_rows=old_rows, max_open_messages=max_open)
    steps = [
        step
        for call in split(Random(shape.seed), writer.messages, call_count)
        for step in decoder.decode(call)
    ]
    oracle = Oracle(writer.keys, WANTED, old_rows)
    transactions = oracle.decode(writer.messages)
    found = Decoded.of(steps)
    assert found.rows == expected(transactions)
    assert found.messages == [message for transaction in transactions for message in transaction.messages]
    assert found.loose == oracle.messages
    assert found.transactions == len(transactions) == writer.ended
    assert found.ends == sorted(set(found.ends))
    assert found.ends[-1:] == [Position.of(transaction.position) for transaction in transactions[-1:]]
    if not streaming:
        assert sum(batch.counts.moves for batch in batches(steps)) == sum(
            transaction.moves for transaction in transactions
        )
    assert decoder.carried_bytes == 0


@given(
    shapes,
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 2**32), min_size=1, max_size=3),
    st.booleans(),
)
@settings(max_examples=rounds(100), deadline=None)
def test_damaged_bytes_are_refused_or_decode_as_the_oracle_does(
    shape: Shape, streaming: bool, asks: bool, damages: list[int], old_rows: bool
) -> None:
    writer = write(shape, streaming=streaming)
    messages = list(writer.messages)
    prefixes = WANTED if asks else frozenset()
    for damage in damages:
        random = Random(damage)
        at = random.randrange(len(messages))
        messages[at] = damaged(random, messages[at])
    decoder = PgOutputDecoder(writer.keys, prefixes=prefixes, old_rows=old_rows)
    oracle = Oracle(writer.keys, prefixes, old_rows)
    try:
        transactions = oracle.decode(messages)
    except ProtocolError:
        with pytest.raises((ProtocolError, SlotTwoPhaseError)):
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
            return (
                message[:at]
                + random.choice([b"\xff", b"\0", b"n", b"t", b"u", b"N", b"\x80"])
                + message[at + 1 :]
            )
        case _:
            return message[:at] + random.randbytes(random.randrange(1, 5)) + message[at:]
