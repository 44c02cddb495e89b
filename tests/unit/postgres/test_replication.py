"""The parts of the replication stream that need no server."""

from __future__ import annotations

import threading

import pytest

from penstock.errors import ConnectionLostError
from penstock.position import Position
from penstock.postgres import replication
from penstock.postgres.connection import SourceAddress
from penstock.postgres.replication import ReplicationStream, StreamRequest, parse_duration, plugin_options


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("500ms", 0.5),
        ("2s", 2.0),
        ("1min", 60.0),
        ("90min", 5400.0),
        ("1h", 3600.0),
        ("1d", 86400.0),
    ],
)
def test_a_duration_is_read_as_the_server_prints_it(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


def test_X02_the_size_of_a_pooled_batch_is_bounded_too() -> None:
    stream = ReplicationStream(SourceAddress.parse("host=nowhere"), StreamRequest("slot", "p", Position.ZERO))
    for _ in range(4):
        stream._hand_over([b"x"] * 3, 6 << 20)
    assert [len(stream.take(0.0)) for _ in range(3)] == [6, 6, 0]


def test_small_batches_are_pooled_unless_they_are_many() -> None:
    stream = ReplicationStream(SourceAddress.parse("host=nowhere"), StreamRequest("slot", "p", Position.ZERO))
    more = threading.Timer(0.05, stream._hand_over, ([b"second"], 6))
    stream._hand_over([b"first"], 5)
    more.start()
    assert stream.take(0.0, hold_seconds=1.0) == [b"first", b"second"]
    more.join()
    stream._hand_over([b"x"], replication._MANY_BYTES)
    assert stream.take(0.0, hold_seconds=3600.0) == [b"x"]
    stream._fail(ConnectionLostError("over"))
    with pytest.raises(ConnectionLostError):
        stream.take(0.0, hold_seconds=3600.0)


@pytest.mark.parametrize(
    ("name", "quoted"),
    [("plain", '"plain"'), ("Two Words", '"Two Words"'), ('a"b', '"a""b"'), ("a,b", '"a,b"')],
)
def test_a_publication_name_is_one_entry_of_the_list(name: str, quoted: str) -> None:
    assert replication._quoted(name) == quoted


@pytest.mark.parametrize(
    ("wants_messages", "options"),
    [(False, {"proto_version": "2", "streaming": "on"}), (True, {"proto_version": "1", "messages": "true"})],
)
def test_X03_open_transactions_are_streamed_unless_messages_are_wanted(
    wants_messages: bool, options: dict[str, str]
) -> None:
    request = StreamRequest("slot", "p", Position.ZERO, wants_messages=wants_messages)
    assert plugin_options(request) == {"publication_names": '"p"', **options}
