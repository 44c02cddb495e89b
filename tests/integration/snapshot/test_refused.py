"""Rows that are refused while a table is copied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.change import ChangeCounts
from penstock.errors import UnrepresentableError
from penstock.pipeline.letter_box import LetterBox, ShadowLetters
from penstock.pipeline.letter_store import LetterStore
from penstock.pipeline.refused_policy import RefusedPolicy
from penstock.postgres.types.policy import TypePolicy
from penstock.schema import TableName
from penstock.sinks.base import TableChanges
from penstock.sinks.layout import Mode
from tests.integration.snapshot.copying import PIPELINE, Copying
from tests.integration.snapshot.local import FileSink, LocalExecutors

STRICT = TypePolicy(on_unrepresentable="error")


class _CrashError(Exception):
    """In the place of SIGKILL."""


def box(lake: Path, policy: RefusedPolicy = RefusedPolicy.DEAD_LETTERS) -> LetterBox:
    """As a run opens it."""
    made = LetterBox(
        LetterStore(lake, PIPELINE), LocalExecutors(), policy_of=lambda _: policy, mode_of=lambda _: Mode.MIRROR, refuse_inexact=True
    )
    made.begin({})
    return made


def make(copying: Copying, table: str) -> TableName:
    copying.captured.execute(
        f"CREATE TABLE {table} (id int PRIMARY KEY, n numeric, v text)",
        f"INSERT INTO {table} SELECT g, CASE WHEN g % 5 = 0 THEN 'NaN' ELSE g::numeric END, repeat(md5(g::text), 20) "
        "FROM generate_series(1, 120) g",
    )
    copying.captured.start()
    return TableName("public", table)


def letters(made: LetterBox) -> list[dict[str, Any]]:
    return [each for each in made.store.load().to_pylist() if each["status"] == "open"]


def assert_split(copying: Copying, made: LetterBox, name: TableName) -> None:
    """What the source held at the fence is in the target, or is a letter."""
    target = copying.sink.load_target(name)
    assert target is not None
    assert target.applied is not None
    held = copying.held[target.applied][name]
    bad = sorted(int(key or 0) for key, number in zip(held["id"], held["n"], strict=True) if number == "NaN")
    found = letters(made)
    assert bad
    assert sorted(json.loads(each["key"])["id"] for each in found) == bad
    assert {each["commit_version"] for each in found} == {target.applied.value}
    assert {each["change_type"] for each in found} == {"snapshot"}
    good = sorted(int(key or 0) for key, number in zip(held["id"], held["n"], strict=True) if number != "NaN")
    assert sorted(row["id"] for row in copying.rows(name)) == good


def test_C08_refused_rows_of_a_copy_are_letters_also_where_they_changed_while_it_was_made(copying: Copying, tmp_path: Path) -> None:
    name = make(copying, "refused")
    made = box(tmp_path / "lake")
    copying.run("refused", chunks=4, policy=STRICT, letters=made)
    assert letters(made) == []
    copying.captured.execute(
        "UPDATE refused SET n = 1 WHERE id IN (5, 60)",
        "DELETE FROM refused WHERE id IN (10, 11, 65)",
        "UPDATE refused SET n = 'NaN' WHERE id IN (1, 2, 118)",
        "UPDATE refused SET v = 'still bad' WHERE id IN (15, 20)",
    )
    _, failures = copying.run("refused", policy=STRICT, letters=made)
    assert not failures
    assert_split(copying, made, name)
    assert {json.loads(each["row"])["v"] for each in letters(made) if each["key"] in ('{"id":15}', '{"id":20}')} == {"still bad"}


def test_C08_letters_of_a_copy_count_once_whenever_it_dies(copying: Copying, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = make(copying, "died")
    real = FileSink.finish_snapshot

    def before(*_: Any) -> None:
        raise _CrashError

    def after(*given: Any) -> None:
        real(*given)
        raise _CrashError

    for crash in (before, after):
        made = box(tmp_path / "lake")
        made.void(name)
        with monkeypatch.context() as patch:
            patch.setattr(FileSink, "finish_snapshot", crash)
            with pytest.raises(_CrashError):
                copying.run("died", policy=STRICT, letters=made)
        assert letters(box(tmp_path / "lake")) == []
    made = box(tmp_path / "lake")
    target = copying.sink.load_target(name)
    assert target is not None
    made.begin({name: target})
    assert_split(copying, made, name)


def test_by_default_a_refused_row_stops_the_copy(copying: Copying, tmp_path: Path) -> None:
    name = make(copying, "stopped")
    _, failures = copying.run("stopped", policy=STRICT, letters=box(tmp_path / "lake", RefusedPolicy.STOP))
    assert isinstance(failures[name], UnrepresentableError)


def test_C08_letters_of_a_copy_that_is_to_replace_another_count_when_it_does(copying: Copying, tmp_path: Path) -> None:
    name = make(copying, "shadowed")
    made = box(tmp_path / "lake")
    copying.run("shadowed", policy=STRICT, letters=ShadowLetters(made))
    target = copying.sink.load_target(name)
    assert target is not None
    assert target.applied is not None
    assert letters(made) == []
    made.renew(copying.sink, target, TableChanges(name, (), ChangeCounts()), target.applied)
    assert letters(made) == []
    made.applied(name)
    assert_split(copying, made, name)
