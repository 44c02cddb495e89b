"""Decode a case with both decoders and compare the results."""

from __future__ import annotations

import re
import struct
from dataclasses import replace

from penstock.errors import PenstockError, ProtocolError, SlotTwoPhaseError
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from tests.fuzz.cases import WHOLE, FuzzCase
from tests.support.pgoutput_decoded import Decoded, Placed, expected
from tests.support.pgoutput_oracle import Oracle, OracleTransaction

_TEXT = re.compile(
    r"(message .{3,6}|keepalive) at [0-9A-F]+/[0-9A-F]+: ([A-Za-z ,-]+)"
    r"|message \d+ of \d+ is neither WAL data nor a keepalive",
    re.DOTALL,
)


class Finding(Exception):
    """The decoders disagree, or ours failed in a way that it must not.

    The text says how, and holds no part of the case.
    """


def judge(case: FuzzCase) -> bool:
    """Whether both decoders accepted the stream; False if both refused it. Raises `Finding` if
    they disagree.
    """
    oracle = Oracle(case.keys, case.prefixes, case.old_rows)
    try:
        transactions: list[OracleTransaction] | None = oracle.decode(case.messages)
    except ProtocolError:
        transactions = None
    # The oracle decodes a transaction when it is complete; our decoder decodes pieces of it earlier.
    max_open = WHOLE if oracle.has_open_transaction and transactions is not None else case.max_open_messages
    decoder = PgOutputDecoder(
        case.keys, prefixes=case.prefixes, old_rows=case.old_rows, max_open_messages=max_open
    )
    try:
        steps = [step for call in case.calls() for step in decoder.decode(call)]
    except (ProtocolError, SlotTwoPhaseError) as error:
        if transactions is not None:
            raise Finding(f"refused what the oracle decodes: {_reason(error)}") from error
        _check_text(error)
        return False
    except Exception as error:
        raise Finding(f"raised {type(error).__name__}") from error
    if transactions is None:
        raise Finding("decoded what the oracle refuses")
    try:
        found = Decoded.of(steps, are_all_ended=False)
    except Exception as error:
        raise Finding(f"gave a batch that breaks a promise: {type(error).__name__}") from error
    if _comparable(found.rows) != _comparable(expected(transactions)):
        raise Finding("gave other rows than the oracle")
    if (
        found.messages != [message for transaction in transactions for message in transaction.messages]
        or found.loose != oracle.messages
    ):
        raise Finding("gave other logical messages than the oracle")
    if found.transactions != len(transactions):
        raise Finding("gave another number of transactions than the oracle")
    return True


def _comparable(rows: list[Placed]) -> list[Placed]:
    """Numbers compare by their bits: NaN equals itself, and 0.0 differs from -0.0."""
    return [
        (*place, replace(row, values={name: _bits(value) for name, value in row.values.items()}))
        for *place, row in rows
    ]


def _bits(value: object) -> object:
    if isinstance(value, list):
        return [_bits(each) for each in value]
    return struct.pack("!d", value) if isinstance(value, float) else value


def _reason(error: PenstockError) -> str:
    return error.message.rpartition(": ")[2]


def _check_text(error: PenstockError) -> None:
    """A refusal names the problem, its place and the kind of message, and never quotes bytes."""
    if isinstance(error, ProtocolError) and not _TEXT.fullmatch(error.message):
        raise Finding("refused with a text that might hold the payload")
