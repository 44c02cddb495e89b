"""What a `PostgresConnector` can be told: the options of a capture, and a few of its own, declared once."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.capture.settings import CaptureSettings
from penstock.connectors.health import HealthThresholds
from penstock.errors import ConfigError
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from penstock.secret import Secret


@dataclass(frozen=True, slots=True)
class ConnectorOption:
    """One option beside those of a capture. An empty `default` means that there is none."""

    name: str
    default: str
    help: str


_THRESHOLDS = HealthThresholds()

OPTIONS: tuple[ConnectorOption, ...] = (
    ConnectorOption("snapshot", "initial", "`initial` copies the tables before it follows them; `never` follows them alone"),
    ConnectorOption("discoverSeconds", "5", "how long `discover_schema` may take"),
    ConnectorOption(
        "idleCheckpointBytes", str(16 << 20), "how much log without any change of ours may pass before a checkpoint is asked for"
    ),
    ConnectorOption("degradedLagBytes", str(_THRESHOLDS.degraded_lag_bytes), "how far behind the source it may be and count as healthy"),
    ConnectorOption("unhealthyLagBytes", str(_THRESHOLDS.unhealthy_lag_bytes), "how far behind the source it may be and count as degraded"),
    ConnectorOption("unhealthyErrors", str(_THRESHOLDS.unhealthy_errors), "after how many errors without progress it counts as unhealthy"),
    ConnectorOption("registryUrl", "", "a schema registry with Confluent's API, such as `https://registry.example/apis/ccompat/v7`"),
    ConnectorOption("registryUser", "", "the name to log in to it with"),
    ConnectorOption("registryPassword", "", "the password that belongs to it"),
    ConnectorOption("registryPrefix", "", "what stands before a table's name in the names of subjects, such as `shop.`"),
    ConnectorOption("registrySeconds", "10", "how long one question to the registry may take"),
)

_DEFAULTS = {option.name.lower(): option.default for option in OPTIONS}
_NAMES = {option.name.lower(): option.name for option in OPTIONS}


@dataclass(frozen=True, slots=True)
class RegistryAddress:
    """How to reach a schema registry. Holds the password apart, so that the rest may be shown."""

    url: str
    user: str = ""
    password: Secret | None = None
    prefix: str = ""
    timeout_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    capture: CaptureSettings
    takes_snapshot: bool = True
    discover_seconds: float = 5.0
    idle_checkpoint_bytes: int = 16 << 20
    thresholds: HealthThresholds = _THRESHOLDS
    registry: RegistryAddress | None = None

    @property
    def tables(self) -> tuple[TableName, ...]:
        """Those that are asked for; empty: all that the publication has."""
        return self.capture.tables

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> ConnectorSettings:
        """Read the options, or raise the `ConfigError` that names the first that cannot be read. Upper and lower case are the same."""
        given = {name.lower(): value for name, value in options.items() if value}
        for name in options:
            _check_known(name)
        for name in ("dsn", "slot", "spool"):
            if name not in given:
                raise ConfigError(f"the option {name!r} is missing", hint="the guide has an example: docs/guides/connectors.md")
        if "tables" in given:
            given["tables"] = _tables(given["tables"])
        address = SourceAddress.parse(given["dsn"])
        if address.password is not None:  # nobody shows these options, so it may stand there
            given = {"password": address.password.reveal(), **given, "dsn": address.dsn}
        capture = CaptureSettings.from_options({name: value for name, value in given.items() if name not in _NAMES})
        if capture.is_separate:
            raise ConfigError("a connector captures by itself, and the option 'process' says separate", hint="leave that option out")
        if capture.polling is not None or capture.by_triggers:
            raise ConfigError("a connector follows the log, and 'polling' and 'byTriggers' are of other captures", hint="leave them out")
        if capture.old_rows:
            raise ConfigError("a connector gives no old rows, and the option 'oldRows' asks for them", hint="leave that option out")
        own = {**_DEFAULTS, **given}
        return cls(
            capture,
            takes_snapshot=_choice(own, "snapshot", "initial", "never") == "initial",
            discover_seconds=_number(own, "discoverSeconds"),
            idle_checkpoint_bytes=int(_number(own, "idleCheckpointBytes")),
            thresholds=HealthThresholds(
                int(_number(own, "degradedLagBytes")), int(_number(own, "unhealthyLagBytes")), int(_number(own, "unhealthyErrors"))
            ),
            registry=_registry(own),
        )


def connector_options_page() -> str:
    """The reference page."""
    lines = [
        "# Options of the Postgres connector",
        "",
        "<!-- Generated from src/penstock/connectors/settings.py by `make docs`. -->",
        "",
        "What `PostgresConnector.open` and `discover_schema` take, all of it as text. Upper and lower case are the same, and an option",
        "that is not known is an error. [The guide](../guides/connectors.md) says how they work together.",
        "",
        "It needs `dsn`, `slot` and `spool`. `tables` names the tables, with commas or as a JSON list; without it they are all that the",
        "publication has. `passwordFile`, instead of `password`, names a file that is read anew for every connection, so a token in it",
        "can be replaced. `password`, `publication`, `numeric`, `onUnrepresentable`, `confirm`, `maxRetainedWal`, `failover` and those",
        "that bound a capture are the same as [for the Spark source](source-options.md).",
        "",
        "| option | default | |",
        "|---|---|---|",
        *(f"| `{option.name}` | {f'`{option.default}`' if option.default else ''} | {option.help} |" for option in OPTIONS),
    ]
    return "\n".join(lines) + "\n"


def _check_known(name: str) -> None:
    known = {*CaptureSettings.OPTION_NAMES, *_NAMES}
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, 1)
        hint = f"did you mean {_NAMES.get(near[0], near[0])!r}?" if near else "the guide lists them: docs/guides/connectors.md"
        raise ConfigError(f"there is no option {name!r}", hint=hint)


def _tables(text: str) -> str:
    """A JSON list, or names with commas between them."""
    try:
        names = json.loads(text) if text.lstrip().startswith("[") else [name.strip() for name in text.split(",")]
        return json.dumps([str(TableName.parse(name)) for name in names])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the option 'tables' cannot be read: {error}", hint='write "public.orders, public.lines"') from error


def _choice(own: Mapping[str, str], name: str, *choices: str) -> str:
    text = own[name.lower()].lower()
    if text not in choices:
        raise ConfigError(f"the option {name!r} is {text!r}", hint=f"use one of: {', '.join(choices)}")
    return text


def _number(own: Mapping[str, str], name: str) -> float:
    text = own[name.lower()]
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"the option {name!r} is not a number of 0 or more: {text!r}", hint=f"the default is {_DEFAULTS[name.lower()]}")
    return value


def _registry(own: Mapping[str, str]) -> RegistryAddress | None:
    url = own["registryurl"].rstrip("/")
    if not url:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("the option 'registryUrl' is not an http or https URL", hint="such as https://registry.example/apis/ccompat/v7")
    if parts.username or parts.password:
        raise ConfigError("the option 'registryUrl' holds a login in clear", hint="use the options registryUser and registryPassword")
    password = Secret(own["registrypassword"]) if own["registrypassword"] else None
    return RegistryAddress(url, own["registryuser"], password, own["registryprefix"], _number(own, "registrySeconds"))
