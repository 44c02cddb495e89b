"""Messages of the event trigger: only signed ones count, whatever else is emitted with its prefix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.change import ChangeCounts, LogicalMessage
from penstock.position import Lsn, Position
from penstock.sinks.lineage import Alteration, AlterationReader, resolve_attnums, sign
from penstock.spool.manifest import SegmentFile
from penstock.spool.reader import FileSlice
from tests.support.spool.builders import ORDERS

KEY = b"secret"


def message(content: bytes, position: int = 10) -> LogicalMessage:
    return LogicalMessage("penstock.ddl", content, Lsn(position), 7, 0, Position.of(position))


def signed(document: object, xid: int = 7) -> bytes:
    named = {**document, "xid": xid} if isinstance(document, dict) else document
    body = json.dumps(named).encode()
    return sign(KEY, body) + b" " + body


def test_message_that_the_trigger_signed_is_read() -> None:
    told = signed({"oid": 77, "columns": [[2, "b"], [1, "a"]]})
    assert AlterationReader("penstock.ddl", KEY).read([message(told)]) == [
        Alteration(77, Position.of(10), {1: "a", 2: "b"})
    ]


@pytest.mark.parametrize(
    "content",
    [
        b'{"oid":1e999}',
        b"[" * 100_000,
        b"\xff\xfe",
        json.dumps({"oid": 77, "columns": [[1, "a"]]}).encode(),
        sign(b"guessed", b"{}") + b" {}",
        signed({"oid": float("inf"), "columns": []}),
        signed({"oid": 1 << 32, "columns": []}),
        signed({"oid": 77, "columns": [[1e999, "a"]]}),
        signed({"oid": 77, "columns": [[1, None]]}),
        signed({"oid": 77, "columns": [[5_000, "a"]]}),
        signed([]),
        sign(KEY, b"[" * 100_000) + b" " + b"[" * 100_000,
        signed({"oid": 77, "columns": None, "more": "x" * (1 << 20)}),
    ],
    ids=lambda content: content[:24].decode(errors="replace"),
)
def test_message_that_does_not_fit_is_ignored(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    reader = AlterationReader("penstock.ddl", KEY)
    for _ in range(9):
        assert reader.read([message(content)]) == []
    assert reader.ignored == 9
    assert [record.message for record in caplog.records] == ["messages of the event trigger ignored"]


def test_signed_message_counts_only_in_the_transaction_that_it_names() -> None:
    reader = AlterationReader("penstock.ddl", KEY)
    told = {"oid": 77, "columns": [[1, "a"]]}
    body = json.dumps(told).encode()
    contents = [signed(told, 8), signed(told, (3 << 32) + 7), signed(told, 7), sign(KEY, body) + b" " + body]
    assert [len(reader.read([message(content)])) for content in contents] == [0, 1, 1, 0]


def test_nothing_counts_without_the_key() -> None:
    assert AlterationReader("penstock.ddl").read([message(signed({"oid": 77, "columns": [[1, "a"]]}))]) == []


def test_dropped_message_makes_earlier_hints_uncertain() -> None:
    """It may have reported a dropped and re-added column of the same name."""
    told = Alteration(ORDERS.oid, Position.of(5), dict(enumerate(ORDERS.column_names, 1)))
    dropped = AlterationReader("penstock.ddl", KEY).read([message(b"", 6)])
    assert [each.concerns(ORDERS.oid) for each in dropped] == [True]
    file = SegmentFile(ORDERS, "", 1, 1, ChangeCounts(), Position.of(10), Position.of(10))
    slices = [FileSlice(Path(), file, None, None)]
    assert resolve_attnums(slices, [told], told.columns)[0].numbers == tuple(told.columns)
    assert resolve_attnums(slices, [told, *dropped], told.columns)[0].numbers is None
