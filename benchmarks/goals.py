"""What capture is held to, as ratios within one run; said after the tables, kept in the results."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.contenders import ARROW, REFERENCE, Measurement
from benchmarks.debezium import Debezium, WarmDebezium
from benchmarks.latency import Latency

Rounds = Mapping[str, Sequence[Measurement]]

_P50_SECONDS = 0.010
_P99_SECONDS = 0.060


@dataclass(frozen=True, slots=True)
class Goal:
    text: str
    measured: float
    is_met: bool | None
    """None where nothing is demanded, and the figure is for the reader."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def median_rate(measured: Sequence[Measurement]) -> float:
    return statistics.median(each.rows_per_second for each in measured)


def median_cpu(measured: Sequence[Measurement]) -> float:
    """Of the client, for one row."""
    return statistics.median(each.client_cpu_seconds / each.rows for each in measured)


def rate_goals(case: str, measured: Rounds) -> Iterator[Goal]:
    """The demands are on inserts of ten columns; of the others, and beside a warm Debezium, the same ratios are told."""
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
