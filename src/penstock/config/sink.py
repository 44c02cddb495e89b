"""Configuration of the sink and of table maintenance."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from penstock.config.secrets import (
    EnvReference,
    FileReference,
    Model,
    TrustedRoles,
    checked_duration,
    parse_seconds,
)
from penstock.postgres.connection import SourceAddress
from penstock.sinks.base import MaintenanceSettings
from penstock.sinks.modes import Mode

_DELTA_KEEP_SECONDS = 7 * 86400.0
_DELTA_HOLD_SECONDS = 3600.0
_ICEBERG_KEEP_SECONDS = 3600.0
_DELTA_VERSIONS = 20_000
_ICEBERG_VERSIONS = 1_000


class MaintenanceConfig(Model):
    """Compaction and retention of Delta and Iceberg tables, in a thread next to the epochs.

    Postgres targets rely on autovacuum; Parquet logs are not compacted.
    """

    compact_after: int = Field(
        default=64,
        ge=0,
        description="Compact a table when it has this number of small files (Iceberg: or of "
        "equality-delete files). Files "
        "that lost most of their rows are rewritten too. 0: never compact.",
    )
    checkpoint_after: int = Field(
        default=50,
        ge=0,
        description="Number of commits to a Delta table after which a checkpoint of its log is written. 0: "
        "never.",
    )
    vacuum: bool = Field(
        default=True,
        description="Remove data that no retained version needs: old commits and files of Delta tables, "
        "snapshots of Iceberg "
        "tables, files of unfinished epochs, epoch records, and dead letters that were superseded or "
        "replayed. With `no`, disks "
        "fill up unless you remove these yourself.",
    )
    keep: str | None = Field(
        default=None,
        description="Retention of table versions, for time travel. At least 1 hour for Delta. Default: 7 "
        "days for Delta, "
        "1 hour for Iceberg.",
    )
    versions: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of versions to retain within `keep`. Versions of the last hour (Delta) "
        "or the last ten "
        f"minutes (Iceberg, unless `keep` is shorter) are always retained. Default: "
        f"{_DELTA_VERSIONS} for Delta, {_ICEBERG_VERSIONS} for Iceberg.",
    )
    keep_letters: str = Field(
        default="30 days",
        description="Retention of dead letters that were superseded or replayed. Open ones are kept.",
    )
    time_limit: str = Field(
        default="10 minutes",
        description="Time limit of one action on one table. A longer one is cancelled and retried later.",
    )

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
    def dead_letters_keep_seconds(self) -> float:
        return parse_seconds(self.keep_letters)

    @property
    def delta(self) -> MaintenanceSettings:
        keep = max(self.delta_keep_seconds, _DELTA_HOLD_SECONDS) if self.vacuum else None
        return MaintenanceSettings(
            self.compact_after, self.checkpoint_after, keep, self.versions or _DELTA_VERSIONS
        )

    @property
    def iceberg_versions(self) -> int:
        return self.versions or _ICEBERG_VERSIONS


class DeltaConfig(Model):
    """Delta tables in a directory, each in `<path>/<schema>/<table>`."""

    path: Path = Field(description="Root directory of the tables, on a volume that all executors can access.")

    @property
    def root(self) -> Path:
        return self.path

    def resolved(self, base: Path) -> DeltaConfig:
        return self.model_copy(update={"path": base / self.path})


class PostgresConfig(Model):
    """Tables in another Postgres database, with the types of the source.

    Types that are not built in become `text`.
    """

    dsn: str = Field(description="Connection string: libpq URI or key=value, without the password.")
    password: EnvReference | FileReference | None = Field(
        None,
        description="`{env: NAME}` or `{file: PATH}`. The file is read for every connection, so it can be "
        "rotated.",
    )
    schema_prefix: str = Field(
        "", description="Prefix of the target schema, before the name of the source schema."
    )
    schemas: dict[str, str] = Field(
        default_factory=dict, description="Target schema for single source schemas, such as `{public: shop}`."
    )
    trusted_roles: TrustedRoles = ()
    state: Path = Field(
        Path("target"),
        description="Directory for epoch records, unfinished snapshots and dead letters, on a volume that "
        "all executors can access.",
    )

    @field_validator("schemas")
    @classmethod
    def _is_ours(cls, value: dict[str, str]) -> dict[str, str]:
        if "penstock" in value.values():
            raise ValueError(
                "the schema penstock is reserved for the positions of the pipeline; choose another"
            )
        return value

    @property
    def root(self) -> Path:
        return self.state

    def address(self) -> SourceAddress:
        return SourceAddress.parse(self.dsn, self.password.follow() if self.password else None).trusting(
            self.trusted_roles
        )

    def resolved(self, base: Path) -> PostgresConfig:
        update: dict[str, object] = {"state": base / self.state}
        if isinstance(self.password, FileReference):
            update["password"] = FileReference(file=base / self.password.file)
        return self.model_copy(update=update)


class ParquetConfig(Model):
    """Append-only change logs as Parquet files, each in `<path>/<schema>/<table>`."""

    path: Path = Field(description="Root directory of the logs, on a volume that all executors can access.")

    @property
    def root(self) -> Path:
        return self.path

    def resolved(self, base: Path) -> ParquetConfig:
        return self.model_copy(update={"path": base / self.path})


class IcebergConfig(Model):
    """Iceberg tables in a Spark catalog, each as `<catalog>.<namespace>.<schema>.<table>`. Needs Spark 4.1.

    Configure the catalog in `spark.conf`, under `spark.sql.catalog.<catalog>`. Without such settings, it is a
    Hadoop catalog in `warehouse`.
    """

    catalog: str = Field(
        "lake", pattern=r"^[A-Za-z][A-Za-z0-9_]*$", description="Name of the catalog in Spark."
    )
    namespace: tuple[str, ...] = Field(
        (), description="Namespace levels above the one of the source schema; `a.b` has two."
    )
    warehouse: Path = Field(
        description="Root directory of a Hadoop catalog; with any catalog, the directory of epoch records "
        "and dead letters."
    )
    format_version: Literal[2, 3] = Field(2, description="Format version of new tables.")

    @field_validator("namespace", mode="before")
    @classmethod
    def _levels(cls, value: object) -> object:
        return tuple(value.split(".")) if isinstance(value, str) else value

    @property
    def root(self) -> Path:
        return self.warehouse

    def resolved(self, base: Path) -> IcebergConfig:
        return self.model_copy(update={"warehouse": base / self.warehouse})


class SinkConfig(Model):
    """The target. Give exactly one of these keys."""

    delta: DeltaConfig | None = Field(None, description="Delta tables.")
    postgres: PostgresConfig | None = Field(None, description="Tables in another Postgres database.")
    parquet: ParquetConfig | None = Field(None, description="Change logs as Parquet files.")
    iceberg: IcebergConfig | None = Field(None, description="Iceberg tables.")

    @model_validator(mode="after")
    def _one(self) -> SinkConfig:
        if len(self._given()) != 1:
            raise ValueError(f"give one of {', '.join(type(self).model_fields)}")
        return self

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The table modes that the sink supports, the default first."""
        return (Mode.APPEND,) if self.parquet is not None else tuple(Mode)

    @property
    def root(self) -> Path:
        """The directory for epoch records, unfinished snapshots and dead letters. It is next to the target
        tables.
        """
        return next(iter(self._given().values())).root

    def resolved(self, base: Path) -> SinkConfig:
        """Return this section with relative paths resolved against `base`, the directory of the file."""
        return self.model_copy(update={name: each.resolved(base) for name, each in self._given().items()})

    def _given(self) -> dict[str, DeltaConfig | PostgresConfig | ParquetConfig | IcebergConfig]:
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
