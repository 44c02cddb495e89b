"""Promises of the benchmark reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.captures import CAPTURES, in_turn
from benchmarks.contenders import ARROW, REFERENCE, Measurement
from benchmarks.copies import DELTA, JDBC, PARQUET, DuckCopy
from benchmarks.copies import REFERENCE as COPY
from benchmarks.debezium import Debezium, Unavailable, prepared_debezium
from benchmarks.goals import exit_code, idle_goal, rate_goals, start_goal, transaction_goals
from benchmarks.memory import Sample, memory_goals
from benchmarks.snapshot import snapshot_goals


def test_without_java_debezium_is_left_out_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(Unavailable, match="there is no java: install a JDK"), prepared_debezium():
        pass


def test_the_goals_compare_medians_of_the_same_run() -> None:
    def rounds(*seconds: float) -> list[Measurement]:
        return [Measurement(1000, each, each / 2, 0.0) for each in seconds]

    measured = {REFERENCE.name: rounds(2, 2, 9), ARROW.name: rounds(1, 1, 9), Debezium.name: rounds(7, 7, 1)}
    goals = list(rate_goals("inserts", measured))
    assert [(goal.measured, goal.is_met) for goal in goals] == [
        (2.0, True),
        (0.5, True),
        (7.0, False),
        (1 / 7, False),
    ]


def test_goals_of_a_large_transaction_cover_its_rows_its_memory_and_remaining_files() -> None:
    def verdicts(peak_bytes: int, rows: int, left: int) -> list[bool | None]:
        goals = list(
            transaction_goals("one", peak_bytes=peak_bytes, spooled_rows=rows, expected_rows=11, left=left)
        )
        assert exit_code(goals) == int(not all(goal.is_met for goal in goals))
        return [goal.is_met for goal in goals]

    assert verdicts(1 << 30, 11, 0) == [True, True, True]
    assert verdicts((1 << 30) + 1, 10, 1) == [False, False, False]
    assert verdicts(1, 12, 0) == [True, False, True], "a repeated row is one too many"


def test_a_start_with_a_thousand_tables_and_an_idle_capture_are_held_to_their_limits() -> None:
    assert [start_goal(1000, seconds).is_met for seconds in (15.0, 15.1)] == [True, False]
    assert start_goal(10_000, 99.0).is_met is None
    assert [idle_goal("idle", share).is_met for share in (0.02, 0.021)] == [True, False]
    assert [exit_code([idle_goal("idle", share)]) for share in (0.02, 0.021)] == [0, 1]
    assert exit_code([start_goal(10_000, 99.0)]) == 0, "a figure without a goal cannot miss it"


def test_a_snapshot_is_held_to_copy_jdbc_and_duckdb_of_the_same_run() -> None:
    def rounds(seconds: float) -> list[Measurement]:
        return [Measurement(1000, seconds, 0.0, 0.0)]

    measured = {
        COPY.name: rounds(1),
        DuckCopy.name: rounds(2),
        PARQUET: rounds(2),
        DELTA: rounds(4),
        JDBC: rounds(3),
    }
    assert [(goal.measured, goal.is_met) for goal in snapshot_goals(measured)] == [
        (0.5, True),
        (1.5, False),
        (1.0, True),
        (0.5, False),
    ]
    del measured[DuckCopy.name]
    assert len(list(snapshot_goals(measured))) == 3


def test_no_capture_is_measured_before_another_in_every_round() -> None:
    names = list(CAPTURES)
    first, second, third = (in_turn(names, number) for number in range(3))
    assert (first, second) == (third, names[::-1])


def test_memory_that_rises_by_more_than_5_percent_after_the_warm_up_is_distinguished_from_flat_memory() -> (
    None
):
    def verdicts(*driver_mb: float) -> list[bool | None]:
        samples = [
            Sample(epoch * 10, 0.0, 10**8, 10**8, 10**9, 9 * 10**8, round(mb * 10**6), 10**8, 10**8)
            for epoch, mb in enumerate(driver_mb)
        ]
        return [goal.is_met for goal in memory_goals(samples, 300) if "≤" in goal.text]

    assert verdicts(100, 150, 200, 200, 201, 200) == [True, True, True, True]
    assert verdicts(100, 150, 200, 200, 208, 216) == [True, True, False, True]
    assert verdicts(200, 200, 200, 200, 150, 100) == [True, True, True, True], (
        "memory that is given back is no leak"
    )
