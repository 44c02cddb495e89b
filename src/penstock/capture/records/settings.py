"""What a record source is told, as text by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.capture.settings import CaptureSettings
from penstock.errors import ConfigError, InvalidUrlError, NoTableError
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from penstock.secret import Secret

_OWN: Final = frozenset({"url", "table", "columns", "snapshot", "waitseconds"})
_NOT_OURS: Final = frozenset({"dsn", "tables", "process", "polling", "bytriggers", "oldrows"})
"""Options of a capture that the source sets by itself, that are of other captures, or ask for what no record shows."""

_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """One table, through one slot.

    `url` and `table` (as schema.table), `slot` and `spool` have to be given. `columns` are the names, with commas between them, of those
    that records have; all by default. `snapshot` is `initial` (the default) or `never`, `waitSeconds` how long a read may wait for a
    record. What else there is has the names of the options of the Spark source.
    """

    capture: CaptureSettings
    table: TableName
    columns: tuple[str, ...] = ()
    takes_snapshot: bool = True
    wait_seconds: float = _WAIT_SECONDS

    @classmethod
    def parse(cls, config: Mapping[str, str]) -> RecordSettings:
        folded = {name.lower(): value for name, value in config.items()}
        table = _table(folded.get("table", ""))
        address = _address(folded.get("url", ""), folded.get("password"))
        rest = {name: value for name, value in folded.items() if name not in _OWN}
        unknown = sorted(set(rest) - (CaptureSettings.OPTION_NAMES - _NOT_OURS))
        if unknown:
            raise ConfigError(
                f"a record source has no option {', '.join(unknown)}", hint="see docs/guides/records.md for those that it has"
            )
        rest["dsn"] = address.dsn
        if address.password is not None:
            rest["password"] = address.password.reveal()
        return cls(
            CaptureSettings.from_options(rest),
            table,
            tuple(name.strip() for name in folded.get("columns", "").split(",") if name.strip()),
            _takes_snapshot(folded.get("snapshot", "initial")),
            _seconds(folded.get("waitseconds", "")),
        )


def _table(text: str) -> TableName:
    if not text.strip():
        raise NoTableError("no table is named to read records from", hint="set table to schema.table")
    try:
        return TableName.parse(text)
    except ValueError as error:
        raise NoTableError(
            f"{text!r} does not name a table", hint="set table to schema.table, in double quotes where SQL needs them"
        ) from error


def _address(url: str, password: str | None) -> SourceAddress:
    if not url.strip():
        raise InvalidUrlError("no address is given to read records from", hint="set url to postgresql://user@host:5432/database")
    try:
        return SourceAddress.parse(url, Secret(password) if password else None)
    except ConfigError as error:
        raise InvalidUrlError(error.message.replace("the source dsn", "url"), hint=error.hint) from error


def _takes_snapshot(text: str) -> bool:
    if text not in ("initial", "never"):
        raise ConfigError(f"the option 'snapshot' is {text!r}", hint="use one of: initial, never")
    return text == "initial"


def _seconds(text: str) -> float:
    try:
        value = float(text or _WAIT_SECONDS)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _LONGEST_WAIT_SECONDS:
        raise ConfigError(f"the option 'waitSeconds' is {text!r}", hint=f"use a number from 0 to {_LONGEST_WAIT_SECONDS:g}")
    return value
