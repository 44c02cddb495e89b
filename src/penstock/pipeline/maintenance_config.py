"""What is done for tables besides epochs, as the configuration says it."""

from __future__ import annotations

from pydantic import Field, field_validator

from penstock.pipeline.durations import checked_duration, parse_seconds
from penstock.pipeline.references import Model
from penstock.sinks.upkeep import Upkeep

_DELTA_KEEP_SECONDS = 7 * 86400.0
_ICEBERG_KEEP_SECONDS = 3600.0


class MaintenanceConfig(Model):
    """What keeps tables quick to read and their disks from filling up. It is done beside the epochs, and takes a table at most a tenth
    of the time. Postgres sees to itself; Parquet logs are left as they are."""

    compact_after: int = Field(
        default=64,
        ge=0,
        description="a table with so many small files, or files of equality deletes (Iceberg), has them written anew, as have "
        "files that lost most of their rows; 0: that is left to others",
    )
    checkpoint_after: int = Field(
        default=50, ge=0, description="commits to a Delta table between two checkpoints of its log; 0: left to others"
    )
    vacuum: bool = Field(
        default=True,
        description="remove what no version needs that is younger than `keep`: files of Delta tables, once a day, and snapshots of Iceberg "
        "tables; no: that is left to others, and disks fill up until they do it",
    )
    keep: str | None = Field(
        default=None,
        description="how long readers can go back in time; an hour at least for Delta. Default: 7 days for Delta, 1 hour for Iceberg, "
        "whose metadata lists every epoch",
    )
    time_limit: str = Field(default="10 minutes", description="what takes longer for one table is given up, and tried again later")

    _durations = field_validator("time_limit")(checked_duration)

    @field_validator("keep")
    @classmethod
    def _duration(cls, value: str | None) -> str | None:
        return None if value is None else checked_duration(value)

    @property
    def limit_seconds(self) -> float:
        return parse_seconds(self.time_limit)

    @property
    def iceberg_keep_seconds(self) -> float:
        return _ICEBERG_KEEP_SECONDS if self.keep is None else parse_seconds(self.keep)

    @property
    def delta_keep_seconds(self) -> float:
        return _DELTA_KEEP_SECONDS if self.keep is None else parse_seconds(self.keep)

    @property
    def delta(self) -> Upkeep:
        return Upkeep(self.compact_after, self.checkpoint_after, self.delta_keep_seconds if self.vacuum else None)
