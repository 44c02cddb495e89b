"""Goals of the benchmarks, as ratios within one run. Printed after the tables and stored in the results."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.contenders import ARROW, REFERENCE, Measurement
from benchmarks.debezium import Debezium, WarmDebezium
from benchmarks.latency import Latency

Rounds = Mapping[str, Sequence[Measurement]]

_MOST_IDLE_SHARE = 0.02
_MOST_CAPTURE_BYTES = 1 << 30
_MOST_START_SECONDS = 15.0
_MANY_TABLES = 1000
_P50_SECONDS = 0.010
_P99_SECONDS = 0.060


@dataclass(frozen=True, slots=True)
class Goal:
    text: str
    measured: float
    is_met: bool | None
    """None if there is no goal and the figure is only reported."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def median_rate(measured: Sequence[Measurement]) -> float:
    return statistics.median(each.rows_per_second for each in measured)


def median_cpu(measured: Sequence[Measurement]) -> float:
    """CPU time of the client for one row."""
    return statistics.median(each.client_cpu_seconds / each.rows for each in measured)


def rate_goals(case: str, measured: Rounds) -> Iterator[Goal]:
    """The goals apply to inserts of ten columns. The same ratios of other workloads, and to a warm Debezium,
    are only reported.
    """
    ours, reference = measured[ARROW.name], measured[REFERENCE.name]
    is_demand = case == "inserts"
    if is_demand:
        rate = median_rate(ours) / median_rate(reference)
        yield Goal(f"{case}: to Arrow ≥ 1.5 × pg_recvlogical's rows/s", rate, rate >= 1.5)
        cpu = median_cpu(ours) / median_cpu(reference)
        yield Goal(f"{case}: to Arrow ≤ 1 × pg_recvlogical's CPU", cpu, cpu <= 1)
    for name in (Debezium.name, WarmDebezium.name):
        if name in measured:
            rate = median_rate(ours) / median_rate(measured[name])
            cpu = median_cpu(ours) / median_cpu(measured[name])
            if is_demand and name == Debezium.name:
                yield Goal(f"{case}: to Arrow ≥ 8 × Debezium's rows/s", rate, rate >= 8)
                yield Goal(f"{case}: to Arrow ≤ 0.125 × Debezium's CPU", cpu, cpu <= 0.125)
            else:
                yield Goal(f"{case}: to Arrow, rows/s beside {name}", rate, None)
                yield Goal(f"{case}: to Arrow, CPU beside {name}", cpu, None)


def latency_goals(measured: Mapping[str, Latency]) -> Iterator[Goal]:
    ours = measured[ARROW.name]
    yield Goal("commit to Arrow, p50 ≤ 10 ms", ours.p50_seconds * 1000, ours.p50_seconds <= _P50_SECONDS)
    yield Goal("commit to Arrow, p99 ≤ 60 ms", ours.p99_seconds * 1000, ours.p99_seconds <= _P99_SECONDS)


def transaction_goals(
    name: str, *, peak_bytes: int, spooled_rows: int, expected_rows: int, left: int
) -> Iterator[Goal]:
    """Figures of a capture during one large transaction. `left`: remaining files of ended transactions."""
    yield Goal(
        f"{name}: peak memory ≤ {_MOST_CAPTURE_BYTES >> 20} MiB",
        peak_bytes / (1 << 20),
        peak_bytes <= _MOST_CAPTURE_BYTES,
    )
    yield Goal(f"{name}: {expected_rows:,} rows in the spool", spooled_rows, spooled_rows == expected_rows)
    yield Goal(f"{name}: nothing left of open transactions", left, left == 0)


def start_goal(tables: int, seconds: float) -> Goal:
    """The goal applies to a thousand tables; for more tables the time is only reported."""
    text = f"{tables:,} tables, from nothing to a row of each in the spool, ≤ {_MOST_START_SECONDS:.0f} s"
    return Goal(text, seconds, seconds <= _MOST_START_SECONDS if tables <= _MANY_TABLES else None)


def idle_goal(name: str, share: float) -> Goal:
    return Goal(f"{name}: % of a core ≤ {_MOST_IDLE_SHARE:.0%}", share * 100, share <= _MOST_IDLE_SHARE)


def exit_code(goals: Sequence[Goal]) -> int:
    """The exit code of a benchmark: 1 if a goal was missed."""
    return int(any(goal.is_met is False for goal in goals))
