"""Options and health thresholds of a `PostgresConnector`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated
from urllib.parse import urlsplit

from penstock.capture.settings import CAPTURE_OPTIONS, CaptureSettings
from penstock.contracts.connector import HealthStatus
from penstock.errors import ConfigError, PenstockError, Recovery
from penstock.lag import CaptureLag
from penstock.options import (
    SECONDS,
    TEXT,
    WHOLE,
    Kind,
    Option,
    OptionTable,
    declared_options,
    read_fields,
    switch,
)
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from penstock.secret import Secret

_SECRET = Kind("text", Secret, format=Secret.reveal)


@dataclass(frozen=True, slots=True)
class HealthThresholds:
    """The limits above which a connector is degraded or unhealthy.

    A single error without progress makes it degraded.
    """

    degraded_lag_bytes: Annotated[
        int,
        Option(
            "Bytes of WAL, not delivered or not acknowledged, above which the connector is degraded.", WHOLE
        ),
    ] = 256 << 20
    unhealthy_lag_bytes: Annotated[
        int,
        Option(
            "Bytes of WAL, not delivered or not acknowledged, above which the connector is unhealthy.", WHOLE
        ),
    ] = 4 << 30
    unhealthy_errors: Annotated[
        int, Option("Errors without progress after which the connector is unhealthy.", WHOLE)
    ] = 5


@dataclass(frozen=True, slots=True)
class Vitals:
    """State of a connector at one moment."""

    trouble: BaseException | None = None
    """The error that stops the feed at this moment."""
    errors: int = 0
    """Number of errors since the last progress."""
    behind_bytes: int | None = None
    """Lag of the position that was handed to the consumer."""
    unacknowledged_bytes: int = 0
    """WAL that was handed to the consumer and that it has not acknowledged."""
    lag: CaptureLag | None = None
    """The last sample of slot and server."""


def assess(vitals: Vitals, thresholds: HealthThresholds) -> HealthStatus:
    """The most severe status that applies, with the first reason for it."""
    unhealthy = _unhealthy(vitals, thresholds)
    if unhealthy is not None:
        return HealthStatus.unhealthy(unhealthy)
    degraded = _degraded(vitals, thresholds)
    return HealthStatus.HEALTHY if degraded is None else HealthStatus.degraded(degraded)


def _unhealthy(vitals: Vitals, thresholds: HealthThresholds) -> str | None:
    trouble, lag = vitals.trouble, vitals.lag
    if trouble is not None and not _is_temporary(trouble):
        return _error_text(trouble)
    if trouble is not None and vitals.errors >= thresholds.unhealthy_errors:
        return f"{vitals.errors} errors without progress, the last one {_error_text(trouble)}"
    if lag is not None and lag.wal_status == "lost":
        return "the slot has been invalidated"
    return _excess(vitals, thresholds.unhealthy_lag_bytes)


def _degraded(vitals: Vitals, thresholds: HealthThresholds) -> str | None:
    if vitals.trouble is not None:
        return _error_text(vitals.trouble)
    excess = _excess(vitals, thresholds.degraded_lag_bytes)
    if excess is not None:
        return excess
    if vitals.lag is not None and vitals.lag.warnings:
        return vitals.lag.warnings[0]
    return None


def _excess(vitals: Vitals, limit_bytes: int) -> str | None:
    """The text for a lag above the limit; None if there is none."""
    if vitals.behind_bytes is not None and vitals.behind_bytes > limit_bytes:
        return f"{vitals.behind_bytes} bytes behind the source, more than {limit_bytes}"
    if vitals.unacknowledged_bytes > limit_bytes:
        return (
            f"{vitals.unacknowledged_bytes} bytes of WAL delivered and not acknowledged, more than "
            f"{limit_bytes}: call notify_epoch_committed after every durable checkpoint"
        )
    return None


def _is_temporary(trouble: BaseException) -> bool:
    return isinstance(trouble, PenstockError) and trouble.recovery is Recovery.RETRY


def _error_text(trouble: BaseException) -> str:
    """Text of an error. For errors of other libraries only the class, because their text may contain row
    values or secrets.
    """
    return (
        f"{trouble.code}: {trouble.message}" if isinstance(trouble, PenstockError) else type(trouble).__name__
    )


@dataclass(frozen=True, slots=True)
class RegistryAddress:
    """Address of a schema registry. The password is separate, so that the rest can be shown."""

    url: Annotated[
        str,
        Option(
            "URL of a schema registry with Confluent's API, such as "
            "`https://registry.example/apis/ccompat/v7`.",
            name="registryUrl",
        ),
    ]
    user: Annotated[str, Option("User name for the registry.", name="registryUser")] = ""
    password: Annotated[
        Secret | None, Option("Password for the registry.", _SECRET, name="registryPassword")
    ] = None
    prefix: Annotated[
        str,
        Option(
            "Prefix of subject names, before the name of the table, such as `shop.`.", name="registryPrefix"
        ),
    ] = ""
    timeout_seconds: Annotated[
        float, Option("Time limit of one request to the registry.", SECONDS, name="registrySeconds")
    ] = 10.0


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    capture: CaptureSettings
    takes_snapshot: Annotated[
        bool,
        Option(
            "`initial`: copy the tables before streaming; `never`: only stream.",
            switch("never", "initial"),
            name="snapshot",
        ),
    ] = True
    discover_seconds: Annotated[float, Option("Time limit of `discover_schema`.", SECONDS)] = 5.0
    idle_checkpoint_bytes: Annotated[
        int, Option("Bytes of WAL without a captured change after which a checkpoint is requested.", WHOLE)
    ] = 16 << 20
    thresholds: HealthThresholds = HealthThresholds()
    registry: RegistryAddress | None = None

    @property
    def tables(self) -> tuple[TableName, ...]:
        """The configured tables; empty means all tables of the publication."""
        return self.capture.tables

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> ConnectorSettings:
        """Read the options; names are case-insensitive. Raises a `ConfigError` for the first invalid one."""
        given = CONNECTOR_OPTIONS.check(options)
        if "tables" in given:
            given["tables"] = _tables(given["tables"])
        address = SourceAddress.parse(given["dsn"])
        if (
            address.password is not None
        ):  # these options are never displayed, so the DSN may contain a password
            given = {"password": address.password.reveal(), **given, "dsn": address.dsn}
        capture = CaptureSettings.from_options(given)
        if capture.is_separate:
            raise ConfigError(
                "a connector does not support 'separate' as the option 'process'", hint="remove that option"
            )
        if capture.polling is not None or capture.by_triggers:
            raise ConfigError(
                "a connector does not support the options 'polling' and 'byTriggers'",
                hint="remove them: a connector reads the WAL",
            )
        if capture.old_rows:
            raise ConfigError("a connector does not support the option 'oldRows'", hint="remove that option")
        return cls(
            capture,
            **read_fields(cls, given),
            thresholds=HealthThresholds(**read_fields(HealthThresholds, given)),
            registry=_registry(given),
        )


_UNSUPPORTED = frozenset({"process", "oldrows"})
"""Options of a capture that `from_options` rejects with a reason."""
_TABLES = Option(
    "Comma-separated or JSON list of tables. Default: all tables of the publication.",
    TEXT.named("list"),
    name="tables",
)


def _capture_options() -> Iterator[Option]:
    for option in CAPTURE_OPTIONS.options:
        if option.key == _TABLES.key:
            yield _TABLES
        else:
            yield replace(option, is_internal=option.is_internal or option.key in _UNSUPPORTED)


CONNECTOR_OPTIONS = OptionTable(
    (
        *_capture_options(),
        *declared_options(ConnectorSettings),
        *declared_options(HealthThresholds),
        *declared_options(RegistryAddress),
    ),
    page="docs/reference/connector-options.md",
    example='"{name}": "…"',
)


def _tables(text: str) -> str:
    """Convert a JSON list or a comma-separated list of tables to a JSON list."""
    try:
        names = (
            json.loads(text) if text.lstrip().startswith("[") else [name.strip() for name in text.split(",")]
        )
        return json.dumps([str(TableName.parse(name)) for name in names])
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the option 'tables' is invalid: {error}", hint='write "public.orders, public.lines"'
        ) from error


def _registry(given: Mapping[str, str]) -> RegistryAddress | None:
    address = RegistryAddress(**read_fields(RegistryAddress, given))
    if not address.url:
        return None
    url = address.url.rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            "the option 'registryUrl' is not an http or https URL",
            hint="write it as https://registry.example/apis/ccompat/v7",
        )
    if parts.username or parts.password:
        raise ConfigError(
            "the option 'registryUrl' contains a user name or password",
            hint="use the options registryUser and registryPassword",
        )
    return replace(address, url=url)
