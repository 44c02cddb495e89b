"""Read all tables of a pipeline as of one commit, while the pipeline runs.

The epoch log has the positions at which every streaming table equalled the source. Each table's own log has
the version for a position. So readers take no locks. While the pipeline applies an epoch table by table,
readers see the previous epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from penstock.config.model import PipelineConfig, load_config
from penstock.errors import ConfigError, EpochMissedError, NoTablesError, TargetRewoundError
from penstock.pipeline.epoch_log import Epoch, EpochLog
from penstock.pipeline.sink_factory import open_sink
from penstock.pipeline.table_states import TableState
from penstock.position import Position
from penstock.schema import TableName


@dataclass(frozen=True, slots=True)
class ConsistentTables(Mapping[str, DataFrame]):
    """The DataFrames of the tables, by `schema.table`. All are as of `position`: they have every commit of
    the source up to `position`, and no later one.
    """

    position: Position
    commit_time: datetime | None
    """The commit time of the last transaction up to `position`."""
    tables: Mapping[str, DataFrame]
    left_out: Mapping[str, TableState]
    """Tables that were not streaming at `position`, each with its state, such as `snapshotting` or `paused`.
    """

    def __getitem__(self, name: str) -> DataFrame:
        if name in self.left_out:
            raise KeyError(
                f"{name} is {self.left_out[name]}, and is not among the tables read at {self.position}"
            )
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
    """Read tables as of the last epoch. With `at`, read them as of the last epoch that ended at or before
    this position (`0/5A2F8E8`) or this time, which needs a time zone.

    `tables`: the tables to read. If one of them is not streaming, an error is raised. Without `tables`, all
    streaming tables are read, and the others are listed in `left_out`. Spark reads the rows when a DataFrame
    is used, from files that epochs do not change. So the result is stable until these files are vacuumed.
    """
    loaded = config if isinstance(config, PipelineConfig) else load_config(Path(config))
    if loaded.sink.postgres is not None:
        raise ConfigError(
            "tables in a Postgres sink have no versions",
            hint="read them there in one transaction with isolation level repeatable read; "
            "penstock.applied has the position of each",
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
                f"{sink.describe(name)} no longer has the version of position {epoch.position}",
                hint="request a later position; old versions are removed when a table is vacuumed or "
                "resynced",
            )
        frames[str(name)] = sink.read(name, version)
    return ConsistentTables(epoch.position, epoch.commit_time, frames, left_out)


def _left_out(epoch: Epoch) -> dict[str, TableState]:
    """Return the tables of this epoch that cannot be read at its position, each with its state. A table whose
    snapshot has a later fence counts as `catching_up`.
    """
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
            raise ConfigError(
                f"at={at.isoformat()} has no time zone",
                hint="pass an aware datetime, such as datetime(…, tzinfo=UTC)",
            )
        found = log.newest(lambda epoch: epoch.commit_time is not None and epoch.commit_time <= at)
    else:
        position = at if isinstance(at, Position) else _parse(at)
        found = log.newest(lambda epoch: epoch.position <= position)
    if found is None:
        moment = "yet" if at is None else f"by {at.isoformat() if isinstance(at, datetime) else at}"
        raise EpochMissedError(
            f"no epoch of this pipeline has ended {moment}",
            hint="run the pipeline, or request a later position or time",
        )
    return found


def _parse(text: str) -> Position:
    try:
        return Position.parse(text)
    except ValueError as error:
        raise ConfigError(
            f"at={text!r} is not a position",
            hint="write it as Postgres does, like 0/5A2F8E8, or give a datetime",
        ) from error


def _required(text: str, epoch: Epoch, left_out: Mapping[str, TableState]) -> TableName:
    name = TableName.parse(text)
    if name not in epoch.tables:
        raise NoTablesError(
            f"the pipeline had no table {name} at {epoch.position}",
            hint="check schema and spelling; names are case-sensitive",
        )
    if str(name) in left_out:
        raise NoTablesError(
            f"{name} was {left_out[str(name)]} at {epoch.position}",
            hint="see penstock status CONFIG; or request another position or time",
        )
    return name
