"""Parts of the stream reader that need neither Spark nor a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from penstock.errors import EnvironmentUnfitError
from penstock.position import Position
from penstock.spark.envelope import read_envelopes
from penstock.spark.request import SourceRequest
from penstock.spark.start import ChangeOffset
from penstock.spark.stream import EnvelopeStreamReader
from penstock.spool.reader import FileSlice
from penstock.spool.retention import released_positions


@pytest.mark.parametrize(
    ("offset", "document"),
    [
        (ChangeOffset.INITIAL, {"position": "0/0"}),
        (ChangeOffset(Position.of(0x1AB), 3), {"position": "0/1AB", "chunk": 3}),
        (ChangeOffset(Position.of(0x1AB)), {"position": "0/1AB"}),
    ],
)
def test_offset_has_one_spelling(offset: ChangeOffset, document: dict[str, object]) -> None:
    assert list(offset.to_document().items()) == list(document.items())
    assert ChangeOffset.parse(document) == offset


def test_position_that_a_person_gave_is_never_released(tmp_path: Path) -> None:
    """It may lie inside a commit record; confirmed to the server, that commit would be lost."""
    start = Position.of(0x1000)
    given = {
        "dsn": "postgresql://cdc@db.example/shop",
        "spool": str(tmp_path),
        "consumer": "c",
        "startingPosition": str(start),
    }
    reader = EnvelopeStreamReader(SourceRequest.parse(given))
    reader._acknowledge(start)
    assert released_positions(tmp_path) == {"c": Position.ZERO}
    reader._acknowledge(Position.of(0x2000))
    assert released_positions(tmp_path) == {"c": Position.of(0x2000)}


def test_spool_that_an_executor_does_not_reach_is_named(tmp_path: Path) -> None:
    slice = FileSlice(tmp_path / "spool" / "segments" / "0" / "a.parquet", cast(Any, None), None, None)
    with pytest.raises(EnvironmentUnfitError, match="cannot be reached") as raised:
        list(read_envelopes([slice]))
    assert 'option("spool"' in str(raised.value.hint)
