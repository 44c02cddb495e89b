"""All tables of a pipeline as of one commit, while it runs.

The record of epochs says at which positions every streaming table held exactly what the source held; each table's own log says which of its
versions that is. So nothing is locked, and nobody waits: while an epoch goes into one table after the other, readers see the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from penstock.errors import ConfigError, EpochMissedError, NoTablesError, TargetRewoundError
from penstock.pipeline.config import PipelineConfig, load_config
from penstock.pipeline.epochs import Epoch, EpochLog
from penstock.pipeline.sinks import open_sink
from penstock.pipeline.states import TableState
from penstock.position import Position
from penstock.schema import TableName


@dataclass(frozen=True, slots=True)
class ConsistentTables(Mapping[str, DataFrame]):
    """DataFrames by `schema.table`, all as of `position`: what had committed on the source up to there, and nothing after it."""

    position: Position
    commit_time: datetime | None
    """Of the last transaction up to `position`."""
    tables: Mapping[str, DataFrame]
    left_out: Mapping[str, TableState]
    """Tables that did not stream at that moment: still being copied, paused or failed."""

    def __getitem__(self, name: str) -> DataFrame:
        if name in self.left_out:
            raise KeyError(f"{name} is {self.left_out[name]}, and does not belong to what holds at {self.position}")
        return self.tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)


def read_consistent(
    spark: SparkSession,
    config: PipelineConfig | Path | str,
    at: Position | datetime | str | None = None,
    tables: Sequence[str] | None = None,
) -> ConsistentTables:
    """The tables at the last epoch; or at the last one that ended by `at`, a position (`0/5A2F8E8`) or a time with its zone.

    `tables` names those that are needed: one that does not stream is then an error. Without it, such tables are left out, and named.
    Rows are read when Spark reads them, from files that later epochs leave alone: until they are vacuumed, the result does not change.
    """
    loaded = config if isinstance(config, PipelineConfig) else load_config(Path(config))
    if loaded.sink.postgres is not None:
        raise ConfigError(
            "tables in Postgres have no versions to be read at",
            hint="read them in one transaction there, at isolation level repeatable read; penstock.applied says how far each table is",
        )
    epoch = _find(EpochLog(loaded.sink.root, loaded.pipeline), at)
    left_out = _left_out(epoch)
    streaming = [name for name in sorted(epoch.tables) if str(name) not in left_out]
    wanted = streaming if tables is None else [_required(name, epoch, left_out) for name in tables]
    sink = open_sink(loaded, spark)
    frames = {}
    for name in wanted:
        version = sink.version_at(name, epoch.position)
        if version is None:
            raise TargetRewoundError(
                f"{sink.describe(name)} has no version any more that holds just what had committed at {epoch.position}",
                hint="ask for a later moment; old versions go when a table is vacuumed, or copied anew",
            )
        frames[str(name)] = sink.read(name, version)
    return ConsistentTables(epoch.position, epoch.commit_time, frames, left_out)


def _left_out(epoch: Epoch) -> dict[str, TableState]:
    """A table that was copied at a later fence is ahead of the epoch that took it in, and so belongs to none up to there."""
    found: dict[str, TableState] = {}
    for name, status in epoch.tables.items():
        if status.state is not TableState.STREAMING:
            found[str(name)] = status.state
        elif status.applied != epoch.position:
            found[str(name)] = TableState.CATCHING_UP
    return found


def _find(log: EpochLog, at: Position | datetime | str | None) -> Epoch:
    if at is None:
        found = log.last()
    elif isinstance(at, datetime):
        if at.tzinfo is None:
            raise ConfigError(f"at={at.isoformat()} has no time zone", hint="datetime(…, tzinfo=UTC)")
        found = log.newest(lambda epoch: epoch.commit_time is not None and epoch.commit_time <= at)
    else:
        position = at if isinstance(at, Position) else _parse(at)
        found = log.newest(lambda epoch: epoch.position <= position)
    if found is None:
        moment = "yet" if at is None else f"by {at.isoformat() if isinstance(at, datetime) else at}"
        raise EpochMissedError(f"no epoch of this pipeline has ended {moment}", hint="run the pipeline, or ask for a later moment")
    return found


def _parse(text: str) -> Position:
    try:
        return Position.parse(text)
    except ValueError as error:
        raise ConfigError(f"at={text!r} is not a position", hint="write it as Postgres does, like 0/5A2F8E8, or give a datetime") from error


def _required(text: str, epoch: Epoch, left_out: Mapping[str, TableState]) -> TableName:
    name = TableName.parse(text)
    if name not in epoch.tables:
        raise NoTablesError(f"the pipeline had no table {name} at {epoch.position}", hint="check schema and spelling; case counts")
    if str(name) in left_out:
        raise NoTablesError(f"{name} was {left_out[str(name)]} at {epoch.position}", hint="see penstock status; or ask for another moment")
    return name
