"""Where the tables go: one kind of sink, with its options."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from penstock.pipeline.references import EnvReference, FileReference, Model, TrustedRoles
from penstock.postgres.connection import SourceAddress
from penstock.sinks.layout import Mode


class DeltaConfig(Model):
    """Delta tables in a directory: a table lands in <path>/<schema>/<table>."""

    path: Path

    @property
    def root(self) -> Path:
        return self.path

    def resolved(self, base: Path) -> DeltaConfig:
        return self.model_copy(update={"path": base / self.path})


class PostgresConfig(Model):
    """Tables of another Postgres database, with the types that they have in the source; what is not built in becomes text."""

    dsn: str = Field(description="libpq URI or key=value string; the password goes elsewhere")
    password: EnvReference | FileReference | None = Field(
        None, description="{env: NAME} or {file: PATH}; a file is read anew for every connection"
    )
    schema_prefix: str = Field("", description="put before the name of the source's schema")
    schemas: dict[str, str] = Field(default_factory=dict, description="for some of the source's schemas, the one that their tables go to")
    trusted_roles: TrustedRoles = ()
    state: Path = Field(
        Path("target"), description="a directory, on a disk that the executors reach, for the record of epochs and of unfinished snapshots"
    )

    @field_validator("schemas")
    @classmethod
    def _is_ours(cls, value: dict[str, str]) -> dict[str, str]:
        if "penstock" in value.values():
            raise ValueError("the schema penstock is where positions are kept; choose another")
        return value

    @property
    def root(self) -> Path:
        return self.state

    def address(self) -> SourceAddress:
        return SourceAddress.parse(self.dsn, self.password.follow() if self.password else None).trusting(self.trusted_roles)

    def resolved(self, base: Path) -> PostgresConfig:
        update: dict[str, object] = {"state": base / self.state}
        if isinstance(self.password, FileReference):
            update["password"] = FileReference(file=base / self.password.file)
        return self.model_copy(update=update)


class ParquetConfig(Model):
    """Logs of changes as Parquet files in a directory, for whatever reads those: a table's log grows in <path>/<schema>/<table>."""

    path: Path

    @property
    def root(self) -> Path:
        return self.path

    def resolved(self, base: Path) -> ParquetConfig:
        return self.model_copy(update={"path": base / self.path})


class IcebergConfig(Model):
    """Iceberg tables in a catalog of Spark's: a table is <catalog>.<namespace>.<schema>.<table>. Needs Spark 4.1.

    A catalog that `spark.conf` does not describe, under `spark.sql.catalog.<catalog>`, is a Hadoop catalog in `warehouse`.
    """

    catalog: str = Field("lake", pattern=r"^[A-Za-z][A-Za-z0-9_]*$", description="the catalog's name in Spark")
    namespace: tuple[str, ...] = Field((), description="levels above those that the source's schemas become; `a.b` is two")
    warehouse: Path = Field(description="where the tables lie, and with them what is known of the pipeline's epochs")
    format_version: Literal[2, 3] = Field(2, description="of tables that are created")

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
    """Where the tables go: one of these."""

    delta: DeltaConfig | None = None
    postgres: PostgresConfig | None = None
    parquet: ParquetConfig | None = None
    iceberg: IcebergConfig | None = None

    @model_validator(mode="after")
    def _one(self) -> SinkConfig:
        if len(self._given()) != 1:
            raise ValueError(f"give one of {', '.join(type(self).model_fields)}")
        return self

    @property
    def modes(self) -> tuple[Mode, ...]:
        """In which tables can be kept there, what they are without being told first."""
        return (Mode.APPEND,) if self.parquet is not None else tuple(Mode)

    @property
    def root(self) -> Path:
        """The directory where the target keeps, beside its tables, what is known of its epochs and of unfinished snapshots."""
        return next(iter(self._given().values())).root

    def resolved(self, base: Path) -> SinkConfig:
        """Paths in the file are relative to the file."""
        return self.model_copy(update={name: each.resolved(base) for name, each in self._given().items()})

    def _given(self) -> dict[str, DeltaConfig | PostgresConfig | ParquetConfig | IcebergConfig]:
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
