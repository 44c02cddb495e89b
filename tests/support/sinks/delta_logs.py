"""Delta logs with checkpoints, made without Spark."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pyarrow.parquet as pq

from penstock.sinks.delta.compaction import SharedTable, compact
from penstock.sinks.delta.state import load_state
from tests.support.delta_tables import InlineExecutors, state_of
from tests.support.sinks.delta_lake import Lake
from tests.support.sinks.source import Value


def follow(lake: Lake, seeded: random.Random | None = None) -> None:
    """One more epoch."""
    keys = [int(str(row["id"].typed)) for row in lake.source.rows.values()]
    some = seeded or random.Random(len(lake.source.log))
    for key in some.sample(keys, min(2, len(keys))):
        lake.source.update((Value(key),), {"note": Value(f"at {lake.source.position} {key}")})
    if len(keys) > 4 and some.random() < 0.4:
        lake.source.delete((Value(some.choice(keys)),))
    lake.source.insert({"id": Value(max(keys) + 1), "note": Value("new")})
    lake.source.commit()
    assert lake.epoch(lake.slices()).apply(InlineExecutors())


def make_one(lake: Lake) -> None:
    state = state_of(lake.path)
    shared = SharedTable(lake.path, threading.Lock(), lambda: load_state(lake.path))
    assert compact(shared, state, list(state.files.values())[:-1], InlineExecutors())


def log_of(lake: Lake, pattern: str = "*.json") -> list[int]:
    return sorted(int(file.name[:20]) for file in (lake.path / "_delta_log").glob(pattern))


def release_ownership(path: Path, version: int) -> None:
    """Rewrite the checkpoint as another writer would."""
    file = path / "_delta_log" / f"{version:020d}.checkpoint.parquet"
    pq.write_table(pq.read_table(file), file, store_schema=False)
