"""Table modes: stored values, and the properties that other modules ask for."""

from __future__ import annotations

import json
import pickle

import pytest

from penstock.change import EXACT, ChangeCounts
from penstock.config.model import PipelineConfig
from penstock.sinks.modes import CURRENT, DELETED, Flag, Mode


def test_stored_and_configured_values_are_the_names_in_lower_case() -> None:
    assert [json.loads(json.dumps(mode)) for mode in Mode] == ["mirror", "soft_delete", "history", "append"]
    assert [Mode.parse(mode.value) for mode in Mode] == list(Mode)
    assert [pickle.loads(pickle.dumps(mode)) for mode in Mode] == list(Mode)
    assert PipelineConfig.model_json_schema()["$defs"]["Mode"]["enum"] == [
        "mirror",
        "soft_delete",
        "history",
        "append",
    ]


def test_a_target_that_stores_no_mode_is_a_mirror() -> None:
    assert Mode.parse(None) is Mode.MIRROR


@pytest.mark.parametrize(
    ("mode", "flag"),
    [
        (Mode.MIRROR, None),
        (Mode.SOFT_DELETE, Flag(DELETED, False)),
        (Mode.HISTORY, Flag(CURRENT, True)),
        (Mode.APPEND, None),
    ],
)
def test_live_rows_are_marked_by_a_column_that_the_mode_adds(mode: Mode, flag: Flag | None) -> None:
    assert mode.live_flag == flag
    assert flag is None or flag.column in mode.added_names


def test_every_mode_adds_the_exact_texts() -> None:
    assert all(EXACT in mode.added_names for mode in Mode)
    assert [mode.adds_columns for mode in Mode] == [False, True, True, True]


@pytest.mark.parametrize(
    ("counts", "adders"),
    [
        (ChangeCounts(inserts=1), [Mode.MIRROR, Mode.APPEND]),
        (ChangeCounts(updates=1), [Mode.APPEND]),
        (ChangeCounts(deletes=1), [Mode.APPEND]),
        (ChangeCounts(truncates=1), [Mode.APPEND]),
    ],
)
def test_only_inserts_into_a_mirror_and_logs_just_add_rows(counts: ChangeCounts, adders: list[Mode]) -> None:
    assert [mode for mode in Mode if mode.adds_only(counts)] == adders


def test_a_mirror_without_key_needs_whole_old_rows() -> None:
    assert [mode for mode in Mode if mode.needs_key(has_old_rows=True)] == [Mode.SOFT_DELETE, Mode.HISTORY]
    assert [mode for mode in Mode if mode.needs_key(has_old_rows=False)] == [
        Mode.MIRROR,
        Mode.SOFT_DELETE,
        Mode.HISTORY,
    ]
