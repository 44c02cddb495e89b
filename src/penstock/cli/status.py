"""Human-readable output of `penstock status` and `penstock check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import timedelta

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.pipeline.checks.findings import CheckReport, Finding, StepState
from penstock.pipeline.snapshots.state import SnapshotProgress
from penstock.pipeline.status import PipelineStatus
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.schema import TableName

_ORDINARY = 20
"""Number of streaming tables to list without `--all`."""
_WIDEST = 60
_ORDER = (
    TableState.FAILED,
    TableState.RETRYING,
    TableState.GONE,
    TableState.PAUSED,
    TableState.PENDING,
    TableState.SNAPSHOTTING,
    TableState.CATCHING_UP,
    TableState.STREAMING,
)
_COLOURS = {TableState.FAILED: "red", TableState.STREAMING: "green"}


def print_status(status: PipelineStatus, console: Console, *, show_all: bool = False) -> None:
    """Print the status, tables that are not streaming first.

    Without `show_all`, only some streaming tables are listed.
    """
    most = None if show_all else _ORDINARY
    console.print(f"[bold]{status.pipeline}[/]", highlight=False)
    for name, value in _facts(status):
        _say(console, f"  {name:<10} {escape(value)}")
    _print_most(
        console, "copying", {str(name): _progress(each) for name, each in status.snapshots.items()}, most
    )
    _print_most(
        console,
        "rejected",
        {str(name): f"{count:,} rows in the dead-letter queue" for name, count in status.letters.items()},
        most,
    )
    if status.epoch is None:
        console.print("  no epoch has been recorded yet", highlight=False)
        return
    _print_tables(console, status.epoch.tables, most)


def _print_tables(console: Console, tables: Mapping[TableName, TableStatus], most: int | None) -> None:
    counts = Counter(each.state for each in tables.values())
    counted = ", ".join(f"{counts[state]:,} {state.value}" for state in _ORDER if counts[state])
    _say(console, f"  {'tables':<10} {len(tables):,}" + (f": {counted}" if counted else ""))
    ordered = sorted(tables.items(), key=lambda each: (_ORDER.index(each[1].state), each[0]))
    unusual = [each for each in ordered if each[1].state is not TableState.STREAMING]
    ordinary = [each for each in ordered if each[1].state is TableState.STREAMING]
    shown, hidden = ordinary[:most], ordinary[len(ordinary[:most]) :]
    listed = [*unusual, *shown]
    width = name_width(str(name) for name, _ in listed)
    for name, each in listed:
        colour = _COLOURS.get(each.state, "yellow")
        _say(
            console,
            f"{escape(f'{name!s:<{width}}')}  [{colour}]{each.state.value:<12}[/]  {each.applied or '-'}",
        )
        if each.reason:
            _say(console, escape(f"    {each.reason}"))
        if each.remedy:
            _say(console, escape(f"    fix: {each.remedy}"))
    if hidden:
        _say(console, f"… and {len(hidden):,} more that are streaming; --all lists them")


def name_width(names: Iterable[str]) -> int:
    """Width of a column of names, up to a limit. A name above the limit moves the rest of its line to the
    right.
    """
    return min(max(map(len, names), default=0), _WIDEST)


def _print_most(console: Console, heading: str, lines: Mapping[str, str], most: int | None) -> None:
    for name in sorted(lines)[:most]:
        _say(console, f"  {heading:<10} {escape(name)}: {escape(lines[name])}")
    if most is not None and len(lines) > most:
        _say(console, f"  {heading:<10} … and {len(lines) - most:,} more; --all lists them")


def _say(console: Console, text: str) -> None:
    """Print without wrapping, so that names can be searched for and copied."""
    console.print(text, highlight=False, soft_wrap=True)


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
        facts.append(
            (
                "slot",
                (
                    f"{status.slot.name}, confirmed {status.slot.confirmed}, {reader}, WAL "
                    f"{status.slot.wal_status}"
                ),
            )
        )
    if status.lag_bytes is not None:
        seconds = f", {status.lag_seconds:.1f} s" if status.lag_seconds is not None else ""
        kept = (
            f"; the slot retains {_bytes(status.retained_bytes)} of WAL"
            if status.retained_bytes is not None
            else ""
        )
        safe_bytes = status.slot.safe_wal_bytes if status.slot is not None else None
        room = f", and may be lost after {_bytes(max(0, safe_bytes))} more" if safe_bytes is not None else ""
        facts.append(("lag", f"{_bytes(status.lag_bytes)}{seconds}{kept}{room}"))
    if status.capture is not None:
        capture = status.capture
        trouble = f" ({capture.failure.code}: {capture.failure.message})" if capture.failure else ""
        rows = f"{capture.rows_total:,} rows, confirm: {capture.confirms}"
        facts.append(("capture", f"{status.capture_state}{trouble}, sealed {capture.sealed}, {rows}"))
        facts += [("fix", capture.failure.hint)] if capture.failure and capture.failure.hint else []
    facts.append(("spool", f"{_bytes(status.spool_bytes)} in {status.spool_segments} segments"))
    facts += [
        ("consumer", f"{each.name}, released {each.released}, {each.age_seconds:.0f} s ago")
        for each in status.consumers
    ]
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


_CHECK_COLOURS = {
    StepState.OK: "green",
    StepState.WARNING: "yellow",
    StepState.PROBLEM: "red",
    StepState.SKIPPED: "dim",
}
_WORDS = {
    StepState.OK: "ok",
    StepState.WARNING: "ok",
    StepState.PROBLEM: "problem",
    StepState.SKIPPED: "skipped",
}


def print_check(report: CheckReport, console: Console) -> None:
    console.print(f"[bold]{escape(report.pipeline or 'no pipeline')}[/]", highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2), show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for step in report.steps:
        table.add_row(
            f"  {step.name}", f"[{_CHECK_COLOURS[step.state]}]{_WORDS[step.state]}[/]", escape(step.detail)
        )
    console.print(table)
    _print_findings("problems", "red", report.problems, console)
    _print_findings("warnings", "yellow", report.warnings, console)
    if not report.problems:
        console.print("\n[green]ready to run[/]")


def _print_findings(title: str, colour: str, findings: list[Finding], console: Console) -> None:
    if findings:
        console.print(f"\n[bold]{len(findings)} {title if len(findings) > 1 else title[:-1]}[/]")
    for finding in findings:
        console.print(
            f"  [{colour}]{finding.code}[/] {escape(finding.what)}", highlight=False, soft_wrap=True
        )
        if finding.fix:
            console.print(f"    fix: {escape(finding.fix)}", highlight=False, soft_wrap=True)
