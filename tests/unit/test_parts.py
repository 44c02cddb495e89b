"""Partitions that take rows along, by what was known of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import SpoolCorruptError
from penstock.pipeline.following.parts import ATTACHED, DETACHED, load_parts, moved_parts, save_parts
from penstock.postgres.attributes import Parts
from penstock.schema import TableName

TABLE = TableName("public", "t")


@pytest.mark.parametrize(
    ("known", "now", "reason"),
    [
        ({1, 2}, {1: False, 2: True}, None),
        ({1, 2}, {1: False, 2: False, 3: False}, None),
        ({1, 2}, {1: False, 2: False, 3: True}, ATTACHED),
        ({1, 2}, {1: False}, DETACHED),
        ({1, 2}, {1: False, 3: False}, DETACHED),
    ],
)
def test_S12_a_part_that_went_or_had_rows_before_it_came_is_noticed(known: set[int], now: Parts, reason: str | None) -> None:
    assert moved_parts({TABLE: known}, {TABLE: now}) == ({} if reason is None else {TABLE: reason})
    assert moved_parts({}, {TABLE: now}) == {}, "what was not known before is as it is"


def test_S12_what_was_seen_is_kept_over_restarts(tmp_path: Path) -> None:
    assert load_parts(tmp_path) == {}
    save_parts(tmp_path, {TABLE: {3, 1}})
    assert load_parts(tmp_path) == {TABLE: {1, 3}}
    (tmp_path / "parts.json").write_text("no", encoding="utf-8")
    with pytest.raises(SpoolCorruptError):
        load_parts(tmp_path)
