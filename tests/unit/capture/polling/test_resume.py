"""The stored position of polling, in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.capture.polling.settings import FileResume
from penstock.capture.pull import Mark
from penstock.errors import SpoolCorruptError
from penstock.position import Position


def test_mark_is_the_one_that_was_saved_last(tmp_path: Path) -> None:
    store = FileResume(tmp_path / "resume")
    assert store.load_mark() is None
    for each in (5, 9):
        store.save_mark(Mark(Position.of(each), f"state {each}"))
    assert FileResume(tmp_path / "resume").load_mark() == Mark(Position.of(9), "state 9")


def test_a_started_position_is_used_in_one_place_only(tmp_path: Path) -> None:
    """The second process may have polled later, and the first may have copied tables since."""
    first, second = FileResume(tmp_path), FileResume(tmp_path)
    first.begin_mark(Mark(Position.of(5), "first"))
    first.save_tables({1: "first"})
    second.begin_mark(Mark(Position.of(7), "second"))
    second.save_tables({1: "second", 2: "second"})
    assert second.load_mark() == Mark(Position.of(5), "first")
    assert second.load_tables() == {1: "first", 2: "second"}


def test_file_that_says_nothing_is_an_error_and_no_new_begin(tmp_path: Path) -> None:
    (tmp_path / "resume.json").write_text("{")
    with pytest.raises(SpoolCorruptError):
        FileResume(tmp_path).load_mark()
