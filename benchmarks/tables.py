"""Output of results: medians with their spread, and whether the goals were met."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from rich.table import Table

from benchmarks.contenders import Measurement
from benchmarks.goals import Goal, Rounds, median_rate

_VERDICTS = {True: "met", False: "[bold]missed[/bold]", None: ""}


def rate_table(title: str, measured: Rounds, reference: str) -> Table:
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("")
    for heading in ("k rows/s", "ratio", "wall s", "client CPU\ns / M rows", "server CPU\ns / M rows"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, mine in measured.items():
        table.add_row(
            name,
            _spread(mine, lambda each: each.rows_per_second / 1000, "{:.0f}"),
            f"{ratio(measured, name, reference):.2f}",
            _spread(mine, lambda each: each.wall_seconds, "{:.2f}"),
            _spread(mine, lambda each: each.client_cpu_seconds / each.rows * 1e6, "{:.2f}"),
            _spread(mine, lambda each: each.server_cpu_seconds / each.rows * 1e6, "{:.2f}"),
        )
    return table


def ratio(measured: Rounds, name: str, reference: str) -> float:
    """Ratio of the median rates; the reference has 1."""
    return median_rate(measured[name]) / median_rate(measured[reference])


def _spread(measured: Sequence[Measurement], figure: Callable[[Measurement], float], form: str) -> str:
    values = [figure(each) for each in measured]
    low, middle, high = (
        form.format(value) for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle}\n{low}–{high}"


def goal_table(goals: Sequence[Goal]) -> Table:
    table = Table(title="goals", title_justify="left")
    table.add_column("")
    table.add_column("measured", justify="right")
    table.add_column("")
    for goal in goals:
        table.add_row(
            goal.text,
            f"{goal.measured:,.0f}" if goal.measured >= 1000 else f"{goal.measured:.3g}",
            _VERDICTS[goal.is_met],
        )
    return table
