"""`penstock run`: start a pipeline, and show progress bars for snapshots, then rate and lag."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from pyspark.sql import SparkSession
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.status import Status

from penstock.cli.capture import on_signals
from penstock.config.model import PipelineConfig, load_config
from penstock.errors import PenstockError
from penstock.logs import is_json, worker_environment
from penstock.pipeline.observer import EpochReport, PipelineObserver
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.sink_factory import sink_packages
from penstock.pipeline.table_states import TableStatus
from penstock.schema import TableName
from penstock.spark.session import build_session

_RATE_WINDOW_SECONDS = 60.0
_TICK_SECONDS = 5.0


class LiveDisplay(PipelineObserver):
    """Shows the progress of a pipeline: draws in place on a terminal, and prints plain lines elsewhere. It is
    a context manager.
    """

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._status is not None:
            self._status.stop()

    def snapshot_planned(self, table: TableName, chunks: int, heap_bytes: int) -> None:
        if self._streaming.is_set():  # the progress bars have ended, and rich allows only one live display
            self._console.print(
                f"  copying {escape(str(table))}: {chunks} chunks", highlight=False, soft_wrap=True
            )
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
        words = f"{done} of {chunks} chunks already copied"
        self._console.print(f"  resumed {escape(str(table))}: {words}", highlight=False, soft_wrap=True)

    def snapshot_finished(self, table: TableName, rows: int) -> None:
        if table not in self._tasks:
            self._console.print(
                f"  copied  {escape(str(table))}: {rows:,} rows", highlight=False, soft_wrap=True
            )

    def streaming_started(self) -> None:
        self._progress.stop()
        if not self._streaming.is_set():
            self._started_at = time.monotonic()
            self._console.print("[bold]Streaming[/]")
        self._streaming.set()

    def wait_for_streaming(self) -> None:
        self._streaming.wait()

    def tick(self, beside: str) -> None:
        """Refresh the live line. Without a terminal, print a line every five seconds."""
        text = (
            f"{beside}; applied {self.rows_total:,}, {self.rows_per_second:,.0f} changes/s, lag "
            f"{self.lag_seconds:.1f} s"
        )
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
        self._console.print(
            f"  [red]failed[/]  {escape(str(table))}: {escape(status.reason or '')}",
            highlight=False,
            soft_wrap=True,
        )
        if status.remedy:
            self._console.print(f"          fix: {escape(status.remedy)}", highlight=False, soft_wrap=True)

    def warned(self, warning: PenstockError) -> None:
        words = f"{warning.code}: {warning.message}; fix: {warning.hint}"
        self._console.print(f"  [yellow]warning[/] {escape(words)}", highlight=False, soft_wrap=True)

    def announced(self, message: str) -> None:
        self._console.print(f"  [yellow]note   [/] {escape(message)}", highlight=False, soft_wrap=True)

    def interrupted(self, reason: str, pause_seconds: float) -> None:
        then = f" (retry in about {pause_seconds:.0f} s)" if pause_seconds else ""
        self._console.print(f"  [yellow]waiting[/] {escape(reason)}{then}", highlight=False, soft_wrap=True)

    @property
    def rows_per_second(self) -> float:
        with self._lock:
            now = time.monotonic()
            seconds = min(_RATE_WINDOW_SECONDS, max(1.0, now - self._started_at))
            return sum(rows for at, rows in self._recent if now - at <= _RATE_WINDOW_SECONDS) / seconds

    @property
    def lag_seconds(self) -> float:
        """Age of the newest applied transaction. It grows while an epoch is being applied."""
        report = self.last_epoch
        return (
            (datetime.now(UTC) - report.commit_time).total_seconds()
            if report is not None and report.commit_time
            else 0.0
        )

    def _line(self, report: EpochReport) -> str:
        return (
            f"  epoch {report.number:>5}  {report.rows:>9,} changes in {report.seconds:5.2f} s  "
            f"{self.rows_per_second:>9,.0f} changes/s  lag {self.lag_seconds:5.2f} s  at {report.position}"
        )


_log = logging.getLogger(__name__)


def run_pipeline(path: Path, *, once: bool, console: Console) -> int:
    """Run until stopped, or with `once` until caught up. Returns the exit code."""
    config = load_config(path)
    config.source.address()  # raises for a missing secret before Spark starts
    ended_by: list[int] = []
    with ExitStack() as stack:
        observer = PipelineObserver() if is_json() else stack.enter_context(LiveDisplay(console))
        pipeline = start_pipeline(config, observer, lambda: load_config(path))

        def stop(number: int) -> None:
            ended_by.append(number)
            pipeline.stop()

        on_signals(stop)
        result = pipeline.run(once=once)
    failed = result.failed
    facts = {"position": str(result.position), "tables": len(result.tables), "failed": len(failed)}
    _log.info("run ended", extra=facts)
    console.print(
        f"at {result.position}: {len(result.tables) - len(failed)} tables up to date, {len(failed)} failed",
        highlight=False,
    )
    if signal.SIGINT in ended_by:
        return 130
    return 1 if failed and (once or len(failed) == len(result.tables)) else 0


def start_pipeline(
    config: PipelineConfig, observer: PipelineObserver, reload: Callable[[], PipelineConfig] | None = None
) -> Pipeline:
    return Pipeline(config, start_session(config), observer, reload)


def start_session(config: PipelineConfig) -> SparkSession:
    """Start Spark with the settings of the configuration.

    The output of its JVM goes to the state directory.
    """
    return build_session(
        f"penstock {config.pipeline}",
        master=config.spark.master,
        packages=config.spark.packages or sink_packages(config),
        conf={
            **{f"spark.executorEnv.{name}": value for name, value in worker_environment().items()},
            **config.spark.settings(),
        },
        log=config.state / "spark.log",
    )
