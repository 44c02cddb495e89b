"""The client processes of the benchmarks.

Each reads one slot to the end, and prints its figures as JSON. The clock starts when everything is imported
and connected and the stream begins, and stops at the last row.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.cases import PUBLICATION
from penstock.capture.settings import CaptureSettings
from penstock.capture.slot_capture import SpoolCapture
from penstock.change import COMMIT_TIMESTAMP, ChangeBatch, Transactions
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from penstock.postgres.replication import ReplicationStream, StreamRequest
from penstock.spool.manifest import SpoolLayout
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import release

_PATIENCE_SECONDS = 300.0
_CONSUMER = "bench"


class _Watch:
    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def report(self) -> dict[str, float]:
        return {
            "wall_seconds": time.perf_counter() - self._wall,
            "cpu_seconds": time.process_time() - self._cpu,
        }


class _Ages:
    """The age of changes when the client has them, by the commit timestamps of their transactions."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def add(self, commit_timestamps: pa.Array | pa.ChunkedArray, seen: float) -> None:
        committed = commit_timestamps.cast(pa.int64()).to_numpy(zero_copy_only=False) / 1e6
        self._parts.append(seen - committed)

    def report(self) -> dict[str, float]:
        p50, p99, worst = np.percentile(np.concatenate(self._parts), [50, 99, 100]).tolist()
        return {"p50_seconds": p50, "p99_seconds": p99, "max_seconds": worst}


@contextmanager
def _stream(dsn: str, slot: str) -> Iterator[ReplicationStream]:
    stream = ReplicationStream(SourceAddress.parse(dsn), StreamRequest(slot, PUBLICATION, Position.ZERO))
    try:
        stream.open()
        yield stream
    finally:
        stream.close()


@contextmanager
def _capture(dsn: str, slot: str) -> Iterator[tuple[SpoolCapture, Path]]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        spool = Path(directory)
        capture = SpoolCapture(CaptureSettings(SourceAddress.parse(dsn), slot, PUBLICATION, spool))
        capture.start()
        try:
            while capture.end is None:
                time.sleep(0.001)
            yield capture, spool
        finally:
            capture.stop()


def _batches(stream: ReplicationStream) -> Iterator[ChangeBatch]:
    decoder = PgOutputDecoder()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        for step in decoder.decode(stream.take(1.0)):
            if isinstance(step, Transactions):
                yield from step.batches
    raise TimeoutError("the rows did not come")


def to_arrow(dsn: str, slot: str, rows: int) -> dict[str, float]:
    with _stream(dsn, slot) as stream:
        watch = _Watch()
        stream.start()
        seen = 0
        for batch in _batches(stream):
            seen += batch.rows.num_rows
            if seen >= rows:
                break
        return watch.report() | {"rows": seen}


def to_spool(dsn: str, slot: str, rows: int) -> dict[str, float]:
    with _capture(dsn, slot) as (capture, spool):
        watch = _Watch()
        reader = SpoolReader(spool)
        for _ in _seals(capture):
            if sum(segment.rows for segment in reader.segments()) >= rows:
                break
        return watch.report() | {"rows": sum(segment.rows for segment in reader.segments())}


def arrow_latency(dsn: str, slot: str, rows: int) -> dict[str, float]:
    ages = _Ages()
    with _stream(dsn, slot) as stream:
        stream.start()
        _say_ready()
        watch = _Watch()
        for batch in _batches(stream):
            ages.add(batch.rows.column(COMMIT_TIMESTAMP), time.time())
            if len(ages) >= rows:
                break
        return watch.report() | ages.report()


def spool_latency(dsn: str, slot: str, rows: int) -> dict[str, float]:
    """Reads every segment and then releases it, as a pipeline does."""
    ages = _Ages()
    with _capture(dsn, slot) as (capture, spool):
        _say_ready()
        watch = _Watch()
        reader = SpoolReader(spool)
        done = Position.ZERO
        for end in _seals(capture):
            seen = time.time()
            for segment in reader.segments():
                if segment.end > done:
                    for file in segment.files:
                        path = SpoolLayout(spool).segment(segment.end) / file.path
                        ages.add(pq.read_table(path, columns=[COMMIT_TIMESTAMP]).column(0), seen)
            done = end
            release(spool, _CONSUMER, done)
            if len(ages) >= rows:
                break
        return watch.report() | ages.report()


def idle(dsn: str, slot: str, rows: int) -> dict[str, float]:
    """An idle stream; `rows` is the number of seconds to wait."""
    with _capture(dsn, slot):
        _say_ready()
        watch = _Watch()
        time.sleep(rows)
        return watch.report()


def _seals(capture: SpoolCapture) -> Iterator[Position]:
    """The end of the spool, each time it moves."""
    end = capture.end or Position.ZERO
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if capture.wait_beyond(end, 1.0):
            end = capture.end or end
            yield end
    raise TimeoutError("the rows did not come")


def _say_ready() -> None:
    print("ready", flush=True)


CLIENTS: Mapping[str, Callable[[str, str, int], dict[str, float]]] = {
    "to-arrow": to_arrow,
    "to-spool": to_spool,
    "arrow-latency": arrow_latency,
    "spool-latency": spool_latency,
    "idle": idle,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--slot", required=True)
    parser.add_argument("--rows", type=int, required=True)
    arguments = parser.parse_args()
    json.dump(CLIENTS[arguments.client](arguments.dsn, arguments.slot, arguments.rows), sys.stdout)


if __name__ == "__main__":
    main()
