"""The `source` section of the configuration: connection, capture method and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.capture.settings import CAPTURE_OPTIONS, XMIN, PollingRules
from penstock.capture.trigger.feed import NAME_RULE, is_change_table_name
from penstock.config.secrets import (
    EnvReference,
    FileReference,
    Model,
    TrustedRoles,
    checked_duration,
    parse_seconds,
)
from penstock.postgres.connection import SourceAddress
from penstock.postgres.publication import ONE_PUBLICATION, names_several
from penstock.postgres.slot import is_slot_name
from penstock.schema import TableName


def capture_option(name: str, **constraints: Any) -> Any:
    """Declare a key with the default and the description of a capture option."""
    option = CAPTURE_OPTIONS[name]
    return Field(option.default, description=option.description, **constraints)


class PollingConfig(Model):
    """Options of `capture: polling`."""

    interval: str = Field(default="1 second", description="Pause between two polls.")
    cursor: str = Field(
        default=XMIN,
        description="Cursor column. Every insert and update must set it to a value not below the existing "
        "ones. The system column `xmin` exists in every table, but with it each poll reads the whole table.",
    )
    cursors: dict[str, str] = Field(
        default_factory=dict,
        description="Cursor column of single tables, such as `{public.orders: updated_at}`.",
    )
    deletes: bool = Field(
        default=True, description="Find deleted rows by comparing all keys of each table at every poll."
    )
    resume: Literal["state", "source"] = Field(
        default="state",
        description="Where the resume position is stored: in the `state` directory, or in the table "
        "`penstock.polling` of the `source`.",
    )

    _durations = field_validator("interval")(checked_duration)

    @field_validator("cursors")
    @classmethod
    def _names(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            TableName.parse(name)
        return value

    def rules(self, state: Path) -> PollingRules:
        return PollingRules(
            parse_seconds(self.interval),
            self.cursor,
            tuple((TableName.parse(name), column) for name, column in self.cursors.items()),
            self.deletes,
            state / "polling" if self.resume == "state" else None,
        )


class TlsConfig(Model):
    """TLS of the connection, with the values of libpq.

    Without this section, the `ssl…` parameters of `dsn` apply.
    """

    mode: Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"] = Field(
        "verify-full", description="As libpq's `sslmode`."
    )
    root_cert: Path | None = Field(None, description="CA certificate, as `sslrootcert`.")
    cert: Path | None = Field(None, description="Client certificate, as `sslcert`.")
    key: Path | None = Field(None, description="Key of the client certificate, as `sslkey`.")


class SourceConfig(Model):
    """The source database."""

    dsn: str = Field(description=CAPTURE_OPTIONS["dsn"].description)
    password: EnvReference | FileReference | None = Field(
        None,
        description="`{env: NAME}` or `{file: PATH}`. The file is read for every connection, so it can be "
        "rotated.",
    )
    slot: str | None = Field(
        None,
        description="Name of the replication slot; with `capture: trigger`, the schema of the change table. "
        "Default: `penstock_<pipeline>`.",
    )
    publication: str | None = Field(
        None,
        description="Name of the publication. Default: `penstock_<pipeline>`.",
        min_length=1,
        max_length=63,
    )
    failover: bool = capture_option("failover")
    capture: Literal["wal", "polling", "trigger"] = Field(
        "wal",
        description="Capture method: `wal` (logical replication), `polling` (periodic queries) or "
        "`trigger` (change table "
        "filled by triggers).",
    )
    polling: PollingConfig | None = Field(None, description="Options of `capture: polling`.")
    process: Literal["embedded", "separate"] = Field(
        "embedded",
        description=CAPTURE_OPTIONS["process"].description,
    )
    spool: Path | None = Field(
        None,
        description="Spool directory. Default: in the state directory. Pipelines that share a slot use the "
        "same spool.",
    )
    event_trigger: bool = Field(
        False,
        description="Install an event trigger that records DDL on columns, so that fewer schema changes "
        "require a resync.",
    )
    old_rows: bool = Field(
        False,
        description="In `append` mode, also write the row as it was before each update and delete. The "
        "tables need REPLICA "
        "IDENTITY FULL, on every partition too.",
    )
    trusted_roles: TrustedRoles = ()
    tls: TlsConfig | None = Field(None, description="TLS settings of the connection.")

    @field_validator("capture", mode="before")
    @classmethod
    def _says_how(cls, value: Any) -> Any:
        if value in ("embedded", "separate"):
            raise ValueError(f"`capture: {value}` was renamed: write process: {value}")
        return value

    @model_validator(mode="after")
    def _is_polled(self) -> SourceConfig:
        if self.polling is not None and self.capture != "polling":
            raise ValueError(
                "polling: has no effect because capture: is not polling; set capture: polling or remove it"
            )
        if self.capture == "polling" and self.process == "separate":
            raise ValueError("capture: polling always runs inside penstock run: remove process: separate")
        of_slots = sorted(
            {"slot", "publication", "failover", "event_trigger", "old_rows"} & self.model_fields_set
        )
        if self.capture == "polling" and of_slots:
            raise ValueError(
                f"{of_slots[0]} has no effect with capture: polling, which uses no slot and no "
                "publication: remove it"
            )
        of_logs = [each for each in of_slots if each != "slot"]
        if self.capture == "trigger" and of_logs:
            raise ValueError(
                f"{of_logs[0]} has no effect with capture: trigger, which does not read the WAL: remove it"
            )
        if self.capture == "trigger" and self.slot is not None and not is_change_table_name(self.slot):
            raise ValueError(f"with capture: trigger, slot is the schema of the change table: {NAME_RULE}")
        return self

    @field_validator("publication", mode="before")
    @classmethod
    def _one_publication(cls, value: Any) -> Any:
        if isinstance(value, list) or (isinstance(value, str) and names_several(value)):
            raise ValueError(ONE_PUBLICATION)
        return value

    @field_validator("slot")
    @classmethod
    def _slot_name(cls, value: str | None) -> str | None:
        if value is not None and not is_slot_name(value):
            raise ValueError(
                "a slot name consists of lower-case letters, digits and underscores, at most 63 of them"
            )
        return value

    def address(self) -> SourceAddress:
        address = SourceAddress.parse(self.dsn, self.password.follow() if self.password else None).trusting(
            self.trusted_roles
        )
        if self.tls is None:
            return address
        pairs = {
            "sslmode": self.tls.mode,
            "sslrootcert": self.tls.root_cert,
            "sslcert": self.tls.cert,
            "sslkey": self.tls.key,
        }
        return address.with_parameters(
            {name: str(value) for name, value in pairs.items() if value is not None}
        )
