"""Logical messages from the server to the spool."""

from __future__ import annotations

import pytest

from tests.support.transactions.source import TransactionSource

FILL = "INSERT INTO public.t SELECT i, 'n' || i FROM generate_series({}, {}) i"


def send(content: str, *, transactional: bool, prefix: str = "penstock") -> str:
    return f"SELECT pg_logical_emit_message({transactional}, '{prefix}', '{content}')"


@pytest.mark.versions(14, 18)
def test_X07_messages_of_requested_prefixes_are_kept_once_over_restarts(source: TransactionSource) -> None:
    prefixes = ("penstock", "outbox")
    with source.capture(prefixes=prefixes) as capture, source.database.connect() as a:
        source.database.execute(send("first", transactional=False))
        source.database.execute(send("not asked for", transactional=True, prefix="else"))
        source.database.execute(send("alone", transactional=True, prefix="outbox"))
        a.execute(FILL.format(1, 2))
        a.execute(send("between", transactional=True))
        a.execute(FILL.format(3, 2000))
        a.execute("SAVEPOINT one")
        a.execute(send("rolled back", transactional=True))
        a.execute(send("loose", transactional=False))
        a.execute(FILL.format(2001, 4000))
        a.execute("ROLLBACK TO one")
        a.commit()
        a.execute(send("rolled back too", transactional=True))
        a.execute(send("loose too", transactional=False))
        a.rollback()
        source.catch_up(capture)
    with source.capture(prefixes=prefixes) as capture:
        source.database.execute(send("last", transactional=False))
        source.catch_up(capture)
    kept = source.messages()
    assert [each.content.decode() for each in kept] == [
        "first",
        "alone",
        "loose",
        "between",
        "loose too",
        "last",
    ]
    between = kept[3]
    assert (between.prefix, between.ordinal, between.is_transactional) == ("penstock", 2, True)
    assert {row["_xid"] for row in source.changes("t")} == {between.xid}
    assert {row["_commit_version"] for row in source.changes("t")} == {
        between.position.value if between.position else None
    }
    assert source.mirrored("t") == source.actual("t")


def test_X07_messages_are_not_sent_unless_requested(source: TransactionSource) -> None:
    with source.capture() as capture:
        source.database.execute(send("x", transactional=True))
        source.database.execute(send("y", transactional=False))
        source.catch_up(capture)
    assert source.kinds["M"] == 0
    assert source.messages() == []
