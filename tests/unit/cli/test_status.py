"""The capture part of `penstock status`, as text and as JSON."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from penstock.cli.status import print_status
from penstock.errors import ConfigError, PipelineBusyError, SlotBusyError
from penstock.lag import CaptureLag, OpenTransaction
from penstock.pipeline.epoch_log import Epoch
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.retries import Retry, RetryLog, load_retries
from penstock.pipeline.status import PipelineStatus
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.position import Lsn, Position
from penstock.postgres.slot import Slot
from penstock.schema import TableName
from penstock.spool.status import CaptureFailure, CaptureStatus

NOW = datetime(2025, 1, 2, tzinfo=UTC)
REPORT = OpenTransaction(4711, "nightly report", "shop", "idle in transaction", 7200.0)
LAG = CaptureLag(NOW, 5000, 1.5, 9000, 123, "extended", 10, 20, (REPORT,))
CAPTURE = CaptureStatus(
    "streaming",
    1,
    Position.of(90),
    Position.of(80),
    7,
    8,
    NOW,
    confirms="spooled",
    confirmed=Position.of(80),
    lag=LAG,
)
SLOT = Slot("penstock_shop", "pgoutput", "logical", "shop", Lsn(10), Position.of(70), "extended", 123)


def status(capture: CaptureStatus) -> PipelineStatus:
    return PipelineStatus(
        "shop", "penstock_shop", None, capture, 0, 0, Position.of(80), SLOT, Position.of(100), None
    )


def printed(capture: CaptureStatus) -> str:
    return shown(status(capture))


def shown(found: PipelineStatus) -> str:
    out = io.StringIO()
    print_status(found, Console(file=out, width=200))
    return out.getvalue()


def test_H06_H07_warnings_and_the_confirmed_position_are_shown() -> None:
    text = printed(CAPTURE)
    assert "confirm: spooled" in text
    assert (
        "wal_status is extended: the slot keeps more WAL than max_wal_size; "
        "it is safe for 123 more bytes of WAL" in text
    )
    assert "held up by process 4711 (nightly report) in shop, open for 7200 s, idle in transaction" in text


def test_L08_an_error_that_is_waited_out_is_shown_with_its_fix() -> None:
    text = printed(
        replace(
            CAPTURE,
            state="waiting",
            failure=CaptureFailure.of(SlotBusyError("taken by 7", hint="end process 7")),
        )
    )
    assert "waiting (PEN-1202: taken by 7)" in text
    assert "fix        end process 7" in text


def test_H07_a_slot_that_waits_to_be_created_says_for_whom() -> None:
    text = printed(replace(CAPTURE, state="creating slot", waits_for=(REPORT,), lag=None))
    assert (
        "the slot is created once this transaction has ended: process 4711 (nightly report) in shop" in text
    )


def test_H06_programs_get_the_same_as_people() -> None:
    document = status(CAPTURE).as_document()
    assert document["warnings"] == list(LAG.warnings)
    capture = document["capture"]
    assert isinstance(capture, dict)
    assert (
        capture["lag_bytes"],
        capture["lag_seconds"],
        capture["retained_wal_bytes"],
        capture["safe_wal_bytes"],
    ) == (
        5000,
        1.5,
        9000,
        123,
    )
    assert capture["open_transactions"][0]["pid"] == 4711
    assert (capture["confirms"], capture["confirmed"]) == ("spooled", "0/50")


def test_a_capture_without_a_process_has_stopped_whatever_its_last_status() -> None:
    dead = replace(status(replace(CAPTURE, waits_for=(REPORT,))), is_capturing=False)
    assert "capture    stopped, sealed" in shown(dead)
    assert "the slot is created once" not in shown(dead)
    document = dead.as_document()["capture"]
    assert isinstance(document, dict)
    assert document["state"] == "stopped"


def test_L01_a_slot_that_is_gone_under_recorded_epochs_is_a_warning() -> None:
    gone = replace(status(CAPTURE), epoch=Epoch(3, Position.of(80), NOW, "7/1"), slot=None)
    assert gone.warnings[0].startswith(
        "slot penstock_shop is gone, and the targets have only the changes up to 0/50"
    )
    assert "warning    slot penstock_shop is gone" in shown(gone)
    assert (
        replace(gone, epoch=None).warnings == replace(gone, source_error="no answer").warnings == LAG.warnings
    )


def test_a_capture_without_a_slot_says_nothing_of_one() -> None:
    found = shown(replace(status(replace(CAPTURE, lag=None)), slot_name="", slot=None))
    assert "slot" not in found
    assert "WAL" not in found


LONG = TableName(
    "a_schema_with_a_long_name", "and_a_table_whose_name_takes_nearly_all_that_postgres_allows_it"
)


def _many_tables() -> PipelineStatus:
    applied = Position.of(80)
    tables = {
        TableName("public", f"t{number:03}"): TableStatus(TableState.STREAMING, applied)
        for number in range(400)
    }
    tables[LONG] = TableStatus(TableState.STREAMING, applied)
    tables[TableName("public", "t333")] = TableStatus.failed(
        SlotBusyError("taken [by] 7", hint="end process 7"), applied
    )
    tables[TableName("public", "t222")] = TableStatus(TableState.PAUSED, applied)
    tables[TableName("public", "t111")] = TableStatus(TableState.SNAPSHOTTING)
    return replace(status(CAPTURE), epoch=Epoch(3, Position.of(80), NOW, "7/1", tables))


def _narrow(found: PipelineStatus, *, show_all: bool = False) -> list[str]:
    out = io.StringIO()
    print_status(found, Console(file=out, width=80), show_all=show_all)
    return out.getvalue().splitlines()


def test_of_many_tables_those_that_failed_come_first_and_ordinary_ones_are_counted() -> None:
    lines = _narrow(_many_tables())
    begin = next(number for number, line in enumerate(lines) if line.startswith("  tables "))
    assert lines[begin] == "  tables     401: 1 failed, 1 paused, 1 snapshotting, 398 streaming"
    assert [line.split()[:2] for line in lines[begin + 1 : begin + 6 : 1] if not line.startswith("    ")] == [
        ["public.t333", "failed"],
        ["public.t222", "paused"],
        ["public.t111", "snapshotting"],
    ]
    assert lines[begin + 2 : begin + 4] == ["    PEN-1202: taken [by] 7", "    fix: end process 7"]
    assert lines[-1] == "… and 378 more that are streaming; --all lists them"
    assert len(lines) < 50


def test_no_name_is_broken_on_a_narrow_terminal_and_all_lists_every_table() -> None:
    found = _many_tables()
    lines = _narrow(found, show_all=True)
    assert found.epoch is not None
    assert all(any(line.startswith(str(name)) for line in lines) for name in found.epoch.tables)
    assert "--all" not in "\n".join(lines)


def test_only_some_of_many_copies_are_listed_without_all() -> None:
    letters = {TableName("public", f"t{number:03}"): number + 1 for number in range(50)}
    found = replace(status(CAPTURE), letters=letters)
    assert sum("in the dead-letter queue" in line for line in _narrow(found)) == 20
    assert "  rejected   … and 30 more; --all lists them" in _narrow(found)
    assert sum("in the dead-letter queue" in line for line in _narrow(found, show_all=True)) == 50


def test_retried_table_is_shown_with_its_fix_and_its_next_attempt() -> None:
    retry = Retry("pipeline", "PEN-3000: the disk is full", "make room", 4, NOW)
    resync = "penstock tables resync CONFIG public.t"
    failing = TableStatus(TableState.RETRYING, Position.of(70), None, "PEN-3006: a file is missing", resync)
    found = replace(
        status(CAPTURE),
        retries=(retry,),
        epoch=Epoch(3, Position.of(80), NOW, "7/1", {TableName("public", "t"): failing}),
    )
    text = shown(found)
    assert (
        "retrying   pipeline: PEN-3000: the disk is full; failed 4 times in a row, next attempt 00:00:00 "
        "UTC; fix: make room" in text
    )
    assert "    PEN-3006: a file is missing\n    fix: penstock tables resync CONFIG public.t" in text
    document = found.as_document()
    assert document["retries"] == [retry.as_document()]
    assert document["tables"]["public.t"]["state"] == "retrying"  # type: ignore[index]


@pytest.mark.parametrize("is_free", [False, True])
def test_a_run_forgets_retries_of_a_killed_one_and_leaves_those_of_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_free: bool
) -> None:
    @contextmanager
    def lock(*_: object) -> Iterator[None]:
        if not is_free:
            raise PipelineBusyError("it runs")
        yield

    def attempt(_goal: object, *, once: bool) -> object:
        assert once
        assert load_retries(tmp_path) == ()
        raise ConfigError("that is enough")

    monkeypatch.setattr("penstock.pipeline.pipeline.jvm_lock", lock)
    RetryLog(tmp_path).note("snapshots", SlotBusyError("busy"), 3, 10.0)
    pipeline = object.__new__(Pipeline)
    pipeline._config = cast(
        "Any",
        SimpleNamespace(spool=tmp_path / "spool", pipeline="shop", lock=tmp_path / "lock", state=tmp_path),
    )
    pipeline._spark = cast("Any", None)
    pipeline._sink = cast("Any", SimpleNamespace(close=lambda: None))
    pipeline._retries = RetryLog(tmp_path)
    monkeypatch.setattr(pipeline, "_find_goal", lambda: Position.of(1))
    monkeypatch.setattr(pipeline, "_attempt", attempt)
    with pytest.raises(ConfigError if is_free else PipelineBusyError):
        pipeline.run(once=True)
    assert [each.subject for each in load_retries(tmp_path)] == ([] if is_free else ["snapshots"])
