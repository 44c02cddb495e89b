"""What a person sees while a pipeline runs: progress bars for snapshots, then one line of rate and lag."""

from __future__ import annotations

import threading
import time
from collections import deque
from datetime import UTC, datetime
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.status import Status

from penstock.errors import PenstockError
from penstock.pipeline.observer import EpochReport, PipelineObserver
from penstock.pipeline.states import TableStatus
from penstock.schema import TableName

_RATE_WINDOW_SECONDS = 60.0
_TICK_SECONDS = 5.0


class LiveDisplay(PipelineObserver):
    """A context manager; draws in place on a terminal, prints plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("  {task.description:<28}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("chunks  {task.fields[rows]:>12,} rows"),
            TimeRemainingColumn(),
            console=console,
            transient=False,
        )
        self._tasks: dict[TableName, TaskID] = {}
        self._rows: dict[TableName, int] = {}
        self._recent: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()
        self._streaming = threading.Event()
        self._status: Status | None = None
        self._ticked_at = 0.0
        self._started_at = 0.0
        self.rows_total = 0
        self.epochs_total = 0
        self.last_epoch: EpochReport | None = None

    def __enter__(self) -> LiveDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()
        if self._status is not None:
            self._status.stop()

    def snapshot_planned(self, table: TableName, chunks: int, heap_bytes: int) -> None:
        if self._streaming.is_set():  # the bars are gone: there is one live line at a time
            self._console.print(f"  copying {escape(str(table))}: {chunks} chunks", highlight=False, soft_wrap=True)
            return
        if not self._tasks:
            self._console.print("[bold]Snapshot[/]")
            self._progress.start()
        self._rows[table] = 0
        if table in self._tasks:
            self._progress.reset(self._tasks[table], total=chunks)
        else:
            self._tasks[table] = self._progress.add_task(str(table), total=chunks, rows=0)

    def snapshot_advanced(self, table: TableName, chunks: int, rows: int, heap_bytes: int) -> None:
        if table not in self._tasks:
            return
        self._rows[table] += rows
        self._progress.update(self._tasks[table], advance=chunks, rows=self._rows[table])

    def snapshot_resumed(self, table: TableName, done: int, chunks: int) -> None:
        words = f"{done} of {chunks} chunks are there already"
        self._console.print(f"  copying {escape(str(table))}: {words}", highlight=False, soft_wrap=True)

    def snapshot_finished(self, table: TableName, rows: int) -> None:
        if table not in self._tasks:
            self._console.print(f"  copied  {escape(str(table))}: {rows:,} rows", highlight=False, soft_wrap=True)

    def streaming_started(self) -> None:
        self._progress.stop()
        if not self._streaming.is_set():
            self._started_at = time.monotonic()
            self._console.print("[bold]Streaming[/]")
        self._streaming.set()

    def wait_for_streaming(self) -> None:
        self._streaming.wait()

    def tick(self, beside: str) -> None:
        """Refresh the one live line; where there is no terminal, print it every five seconds."""
        text = f"{beside}; applied {self.rows_total:,}, {self.rows_per_second:,.0f} changes/s, lag {self.lag_seconds:.1f} s"
        if self._console.is_terminal:
            if self._status is None:
                self._status = self._console.status(text)
                self._status.start()
            self._status.update(text)
        elif time.monotonic() - self._ticked_at >= _TICK_SECONDS:
            self._ticked_at = time.monotonic()
            self._console.print(f"  {text}", highlight=False, soft_wrap=True)

    def epoch_recorded(self, report: EpochReport) -> None:
        with self._lock:
            now = time.monotonic()
            self.rows_total += report.rows
            self.epochs_total += 1
            self.last_epoch = report
            self._recent.append((now, report.rows))
            while now - self._recent[0][0] > _RATE_WINDOW_SECONDS:
                self._recent.popleft()
        if report.rows:
            self._console.print(self._line(report), highlight=False, soft_wrap=True)

    def table_failed(self, table: TableName, status: TableStatus) -> None:
        self._console.print(f"  [red]failed[/]  {escape(str(table))}: {escape(status.reason or '')}", highlight=False, soft_wrap=True)
        if status.remedy:
            self._console.print(f"          fix: {escape(status.remedy)}", highlight=False, soft_wrap=True)

    def warned(self, warning: PenstockError) -> None:
        words = f"{warning.code}: {warning.message}; fix: {warning.hint}"
        self._console.print(f"  [yellow]warning[/] {escape(words)}", highlight=False, soft_wrap=True)

    def interrupted(self, reason: str, pause_seconds: float) -> None:
        soon = f" in about {pause_seconds:.0f} s" if pause_seconds else ""
        self._console.print(f"  [yellow]waiting[/] {escape(reason)} (trying again{soon})", highlight=False, soft_wrap=True)

    @property
    def rows_per_second(self) -> float:
        with self._lock:
            now = time.monotonic()
            seconds = min(_RATE_WINDOW_SECONDS, max(1.0, now - self._started_at))
            return sum(rows for at, rows in self._recent if now - at <= _RATE_WINDOW_SECONDS) / seconds

    @property
    def lag_seconds(self) -> float:
        """How long ago the newest applied transaction committed; it grows while an epoch is being applied."""
        report = self.last_epoch
        return (datetime.now(UTC) - report.commit_time).total_seconds() if report is not None and report.commit_time else 0.0

    def _line(self, report: EpochReport) -> str:
        return (
            f"  epoch {report.number:>5}  {report.rows:>9,} changes in {report.seconds:5.2f} s  "
            f"{self.rows_per_second:>9,.0f} changes/s  lag {self.lag_seconds:5.2f} s  at {report.position}"
        )
