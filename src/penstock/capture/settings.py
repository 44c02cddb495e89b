"""What a capture needs to know, declared once.

The same settings travel as the options of the Spark source, so they have a plain string form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from penstock.capture.confirming import Confirm
from penstock.capture.polling_rules import PollingRules
from penstock.errors import ConfigError
from penstock.location import absolute_path
from penstock.postgres.connection import SourceAddress
from penstock.postgres.publication import ONE_PUBLICATION, names_several
from penstock.postgres.slot import check_slot_name
from penstock.postgres.types.policy import TypePolicy
from penstock.schema import TableName
from penstock.secret import FileSecret, Secret


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """How much a capture may hold, and how long it may wait. All bounds, no targets."""

    segment_rows: int = 100_000
    segment_bytes: int = 64 << 20
    segment_seconds: float = 0.5
    seal_seconds: float = 0.02
    """The least time between two seals; it grows by itself while readers are behind."""
    quiet_seconds: float = 5.0
    """How often, at most, an idle or filtered database moves the position forward."""
    buffer_bytes: int = 128 << 20
    spool_bytes: int = 20 << 30
    silence_seconds: float = 60.0
    """How long the server may say nothing before the connection counts as lost, unless its wal_sender_timeout is longer still."""
    watch_seconds: float = 5.0
    """How often the server is asked how its log, the slot and long transactions stand."""
    long_transaction_seconds: float = 60.0
    """From what age on an open transaction is named."""


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """One slot, one publication, one spool."""

    address: SourceAddress
    slot: str
    publication: str
    spool: Path
    tables: tuple[TableName, ...] = ()
    """What the publication must hold when the capture itself has to create it; empty if it must not create anything."""
    limits: CaptureLimits = CaptureLimits()
    types: TypePolicy = TypePolicy.DEFAULT
    failover: bool = False
    """Whether the slot is marked to be copied to standbys; Postgres 17 and later."""
    confirm: Confirm = Confirm.APPLIED
    max_retained_bytes: int | None = None
    """How much WAL the slot may retain before `applied` gives way to `spooled`; None: never."""
    message_prefixes: tuple[str, ...] = ()
    """Of the logical messages that are kept in the spool; all others are passed over."""
    is_separate: bool = False
    """Whether a process of its own captures into the spool, so that readers only follow it."""
    polling: PollingRules | None = None
    """How tables are asked, where there is no slot to follow: `slot` is then only a name, and `publication` nothing."""
    by_triggers: bool = False
    """Whether triggers write changes down, where there is no slot to follow: `slot` is then the name of the change table."""
    old_rows: bool = False
    """Whether rows as they were before an update or a delete are kept too, where the log has them."""

    OPTION_NAMES: ClassVar[frozenset[str]]
    """What `from_options` reads, in lower case."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "spool", absolute_path(self.spool, "spool"))

    def to_options(self) -> dict[str, str]:
        """As options of the Spark source. Spark hides the option called `password` wherever it shows options.

        A file is read where the options are, which is where the capture runs; tasks are given what it said.
        """
        options = {
            "dsn": self.address.dsn,
            "slot": self.slot,
            "publication": self.publication,
            "spool": str(self.spool),
            "tables": tables_option(self.tables),
            "failover": str(self.failover).lower(),
            "confirm": self.confirm.value,
            "maxRetainedWal": "" if self.max_retained_bytes is None else str(self.max_retained_bytes),
            "messagePrefixes": json.dumps(self.message_prefixes),
            "process": "separate" if self.is_separate else "embedded",
            "polling": "" if self.polling is None else self.polling.to_text(),
            "byTriggers": str(self.by_triggers).lower(),
            "oldRows": str(self.old_rows).lower(),
        }
        if isinstance(self.address.password, FileSecret):
            options["passwordFile"] = str(self.address.password.path)
        elif self.address.password is not None:
            options["password"] = self.address.password.reveal()
        for field in fields(CaptureLimits):
            options[_camel(field.name)] = str(getattr(self.limits, field.name))
        return options | {_camel(field.name): getattr(self.types, field.name) for field in fields(TypePolicy)}

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> CaptureSettings:
        """Read the options back. Spark folds their names to lower case."""
        folded = {name.lower(): value for name, value in options.items()}
        for required in ("dsn", "slot", "spool"):
            if not folded.get(required):
                raise ConfigError(f"the option {required!r} is missing", hint=f'add .option("{required}", …)')
        check_slot_name(folded["slot"])
        if names_several(folded.get("publication") or ""):
            raise ConfigError(f"the option 'publication' lists several: {folded['publication']}", hint=ONE_PUBLICATION)
        return cls(
            _address(folded),
            folded["slot"],
            folded.get("publication") or folded["slot"],
            Path(folded["spool"]),
            tuple(TableName.parse(name) for name in json.loads(folded.get("tables") or "[]")),
            _limits(folded),
            _types(folded),
            _choice("failover", folded.get("failover") or "false", ("false", "true")) == "true",
            Confirm(_choice("confirm", folded.get("confirm") or Confirm.APPLIED, [each.value for each in Confirm])),
            int(_number("maxRetainedWal", folded["maxretainedwal"], 0)) if folded.get("maxretainedwal") else None,
            tuple(json.loads(folded.get("messageprefixes") or "[]")),
            _choice("process", folded.get("process") or "embedded", ("embedded", "separate")) == "separate",
            PollingRules.parse(folded["polling"]) if folded.get("polling") else None,
            _choice("byTriggers", folded.get("bytriggers") or "false", ("false", "true")) == "true",
            _choice("oldRows", folded.get("oldrows") or "false", ("false", "true")) == "true",
        )


def tables_option(tables: Iterable[TableName]) -> str:
    """The option `tables`, which users do not write themselves. JSON, since a table's name may hold any character."""
    return json.dumps([str(table) for table in tables])


def _address(folded: Mapping[str, str]) -> SourceAddress:
    password = folded.get("password")
    address = SourceAddress.parse(folded["dsn"])
    if address.password is not None:
        raise ConfigError(
            "the option 'dsn' holds a password, and Spark shows that option wherever it prints a plan",
            hint='take it out of the dsn and add .option("password", …), which Spark hides',
        )
    file = folded.get("passwordfile")
    if password and file:
        raise ConfigError("the options 'password' and 'passwordFile' are both given", hint="leave one of them out")
    if file:
        return SourceAddress(address.dsn, FileSecret.at(Path(file)))
    return SourceAddress(address.dsn, Secret(password)) if password else address


def _limits(folded: Mapping[str, str]) -> CaptureLimits:
    defaults = CaptureLimits()
    values: dict[str, int | float] = {}
    for field in fields(CaptureLimits):
        default = getattr(defaults, field.name)
        text = folded.get(_camel(field.name).lower())
        values[field.name] = default if text is None else _number(_camel(field.name), text, default)
    return CaptureLimits(**values)  # type: ignore[arg-type]


def _types(folded: Mapping[str, str]) -> TypePolicy:
    given = {field.name: folded.get(_camel(field.name).lower()) for field in fields(TypePolicy)}
    try:
        return TypePolicy(**{name: text for name, text in given.items() if text is not None})
    except ValueError as error:
        raise ConfigError(f"an option about types is wrong: {error}", hint="see docs/reference/types.md") from error


def _choice(option: str, text: str, choices: Sequence[str]) -> str:
    if text.lower() not in choices:
        raise ConfigError(f"the option {option!r} is {text!r}", hint=f"use one of: {', '.join(choices)}")
    return text.lower()


def _number(option: str, text: str, default: float) -> float:
    """Of the type that the default has. Not a number, infinite or negative: none of them is a bound."""
    try:
        value = type(default)(text)
    except ValueError:
        value = -1
    if not 0 <= value < math.inf:
        raise ConfigError(f"the option {option!r} is not a number of 0 or more: {text!r}", hint=f"the default is {default}")
    return value


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


CaptureSettings.OPTION_NAMES = frozenset(
    {"password", "passwordfile"} | {name.lower() for name in CaptureSettings(SourceAddress(""), "", "", Path()).to_options()}
)
