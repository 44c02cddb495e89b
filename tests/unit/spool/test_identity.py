from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import SpoolCorruptError, SpoolFormatError
from penstock.spool import CaptureIdentity, ensure_identity, load_identity
from tests.support.spool.builders import Commit, capture

OURS = CaptureIdentity("shop", "shop_pub", "7412345678901234567", 1)


def test_a_new_spool_becomes_the_captures_own(tmp_path: Path) -> None:
    assert load_identity(tmp_path / "spool") is None
    ensure_identity(tmp_path / "spool", OURS)
    ensure_identity(tmp_path / "spool", OURS)
    assert load_identity(tmp_path / "spool") == OURS


@pytest.mark.parametrize(
    "other", [replace(OURS, slot="x"), replace(OURS, publication="x"), replace(OURS, system_identifier="1")]
)
def test_the_spool_of_another_capture_is_refused_with_the_difference(
    tmp_path: Path, other: CaptureIdentity
) -> None:
    ensure_identity(tmp_path, OURS)
    with pytest.raises(SpoolFormatError, match=r"another source: \w+ is \w+, not \w+\n") as caught:
        ensure_identity(tmp_path, other)
    assert caught.value.hint
    assert load_identity(tmp_path) == OURS


def test_a_new_timeline_is_written_down(tmp_path: Path) -> None:
    """The capture checks earlier, on the server, whether the new timeline continues the old one; a spool
    cannot.
    """
    ensure_identity(tmp_path, OURS)
    ensure_identity(tmp_path, replace(OURS, timeline=2))
    assert load_identity(tmp_path) == replace(OURS, timeline=2)


def test_segments_without_an_owner_are_not_taken_over(tmp_path: Path) -> None:
    capture(tmp_path, 0, [[Commit(10)]])
    with pytest.raises(SpoolFormatError, match="their source is unknown"):
        ensure_identity(tmp_path, OURS)


def test_a_newer_spool_is_refused(tmp_path: Path) -> None:
    (tmp_path / "capture.json").write_text('{"format": 4, "slots": ["shop"]}')
    with pytest.raises(SpoolFormatError, match="format 4"):
        ensure_identity(tmp_path, OURS)


def test_a_damaged_identity_is_called_corrupt(tmp_path: Path) -> None:
    (tmp_path / "capture.json").write_text('{"format": 1, "slot": "shop"}')
    with pytest.raises(SpoolCorruptError):
        load_identity(tmp_path)
