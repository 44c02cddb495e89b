"""`penstock status`, for people."""

from __future__ import annotations

from datetime import timedelta

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.pipeline.snapshots.progress import SnapshotProgress
from penstock.pipeline.states import TableState
from penstock.pipeline.status import PipelineStatus


def print_status(status: PipelineStatus, console: Console) -> None:
    console.print(f"[bold]{status.pipeline}[/]", highlight=False)
    for name, value in _facts(status):
        console.print(f"  {name:<10} {escape(value)}", highlight=False, soft_wrap=True)
    for table_name, progress in sorted(status.snapshots.items()):
        console.print(f"  {'copying':<10} {escape(str(table_name))}: {_progress(progress)}", highlight=False, soft_wrap=True)
    for table_name, count in sorted(status.letters.items()):
        console.print(f"  {'letters':<10} {escape(str(table_name))}: {count:,} rows could not be applied", highlight=False, soft_wrap=True)
    if status.epoch is None:
        console.print("  no epoch has been recorded yet", highlight=False)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for heading in ("table", "state", "applied", ""):
        table.add_column(heading, overflow="fold")
    for table_name, each in sorted(status.epoch.tables.items()):
        colour = {TableState.FAILED: "red", TableState.RETRYING: "yellow"}.get(each.state, "green")
        why = f"{each.reason}; fix: {each.remedy}" if each.reason else ""
        table.add_row(escape(str(table_name)), f"[{colour}]{each.state.value}[/]", str(each.applied or "-"), escape(why))
    console.print(table)


def _facts(status: PipelineStatus) -> list[tuple[str, str]]:
    facts = []
    if status.epoch is not None:
        facts.append(("position", f"{status.epoch.position}, epoch {status.epoch.number}"))
    if status.source_error is not None:
        facts.append(("source", status.source_error))
    elif status.slot is None and status.slot_name:
        facts.append(("slot", f"{status.slot_name} does not exist"))
    elif status.slot is not None:
        reader = f"read by process {status.slot.active_pid}" if status.slot.active_pid else "not being read"
        facts.append(("slot", f"{status.slot.name}, confirmed {status.slot.confirmed}, {reader}, WAL {status.slot.wal_status}"))
    if status.lag_bytes is not None:
        seconds = f", {status.lag_seconds:.1f} s" if status.lag_seconds is not None else ""
        kept = f"; the server keeps {_bytes(status.retained_bytes)} of WAL" if status.retained_bytes is not None else ""
        safe_bytes = status.slot.safe_wal_bytes if status.slot is not None else None
        room = f" and has room for {_bytes(max(0, safe_bytes))}" if safe_bytes is not None else ""
        facts.append(("lag", f"{_bytes(status.lag_bytes)}{seconds}{kept}{room}"))
    if status.capture is not None:
        capture = status.capture
        trouble = f" ({capture.failure.code}: {capture.failure.message})" if capture.failure else ""
        rows = f"{capture.rows_total:,} rows, confirms what is {capture.confirms}"
        facts.append(("capture", f"{status.capture_state}{trouble}, sealed {capture.sealed}, {rows}"))
        facts += [("fix", capture.failure.hint)] if capture.failure and capture.failure.hint else []
    facts.append(("spool", f"{_bytes(status.spool_bytes)} in {status.spool_segments} segments"))
    facts += [("consumer", f"{each.name}, released {each.released}, {each.age_seconds:.0f} s ago") for each in status.consumers]
    facts += [("warning", each) for each in status.warnings]
    facts += [("retrying", each.describe()) for each in status.retries]
    return facts


def _progress(progress: SnapshotProgress) -> str:
    done = f"{progress.chunks_done} of {progress.chunks_total} chunks, {progress.rows:,} rows"
    left = progress.seconds_left
    if progress.rows_per_second is None or left is None:
        return done
    return f"{done}, {progress.rows_per_second:,.0f} rows/s, {timedelta(seconds=round(left))} left"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
