"""What is done for tables besides epochs, as the configuration says it."""

from __future__ import annotations

from pydantic import Field, field_validator

from penstock.pipeline.durations import checked_duration, parse_seconds
from penstock.pipeline.references import Model
from penstock.sinks.upkeep import Upkeep

_DELTA_KEEP_SECONDS = 7 * 86400.0
_DELTA_HOLD_SECONDS = 3600.0
_ICEBERG_KEEP_SECONDS = 3600.0
_DELTA_VERSIONS = 20_000
_ICEBERG_VERSIONS = 1_000


class MaintenanceConfig(Model):
    """What keeps tables quick to read and their disks from filling up. It is done beside the epochs. Postgres sees to itself; Parquet logs
    are left as they are."""

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
        description="remove what no version needs that is kept: commits and files of Delta tables, snapshots of Iceberg tables and files "
        "of unfinished epochs, records of epochs, settled dead letters; no: that is left to others, and disks fill up until they do it",
    )
    keep: str | None = Field(
        default=None,
        description="how long readers can go back in time; an hour at least for Delta. Default: 7 days for Delta, 1 hour for Iceberg, "
        "whose metadata lists every epoch",
    )
    versions: int | None = Field(
        default=None,
        ge=1,
        description="of the versions that `keep` keeps, at most so many, besides those of the last hour (Delta) or ten minutes (Iceberg). "
        f"Default: {_DELTA_VERSIONS} for Delta, {_ICEBERG_VERSIONS} for Iceberg",
    )
    keep_letters: str = Field(default="30 days", description="how long dead letters are kept that have been settled")
    time_limit: str = Field(default="10 minutes", description="what takes longer for one table is given up, and tried again later")

    _durations = field_validator("time_limit", "keep_letters")(checked_duration)

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
    def letters_keep_seconds(self) -> float:
        return parse_seconds(self.keep_letters)

    @property
    def delta(self) -> Upkeep:
        keep = max(self.delta_keep_seconds, _DELTA_HOLD_SECONDS) if self.vacuum else None
        return Upkeep(self.compact_after, self.checkpoint_after, keep, self.versions or _DELTA_VERSIONS)

    @property
    def iceberg_versions(self) -> int:
        return self.versions or _ICEBERG_VERSIONS
