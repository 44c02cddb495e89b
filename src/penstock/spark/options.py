"""The options of `format("postgres-cdc")`, declared once.

Validation, its errors and the reference page come from `OPTIONS`. Spark folds the names of options to lower case, and so do we.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.capture.confirming import Confirm
from penstock.capture.settings import CaptureLimits, CaptureSettings
from penstock.errors import ConfigError
from penstock.postgres.types.policy import TypePolicy
from penstock.spark.admission import Admission

SNAPSHOT, NOW, SLOT = "snapshot", "now", "slot"
"""Where a new query may begin; a position, such as 0/16B3748, is the fourth way."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option as a user may write it. An empty `default` means that there is none; `help` is one line for the reference."""

    name: str
    kind: str
    default: str
    help: str
    is_required: bool = False


_LIMITS = CaptureLimits()
_ADMISSION = Admission()
_TYPES = TypePolicy.DEFAULT


def _limit(name: str, kind: str, field: str, help: str) -> Option:
    return Option(name, kind, str(getattr(_LIMITS, field)), help)


OPTIONS: tuple[Option, ...] = (
    Option("dsn", "text", "", "how to reach the source, as libpq reads it, without a password", is_required=True),
    Option("password", "text", "", "the role's password; Spark hides it wherever it shows options"),
    Option("table", "schema.name", "", "the one table whose typed changes, or current rows, are wanted"),
    Option("tables", "list", "", "instead of `table`: names or patterns, such as `public.*, sales.orders`; changes come as envelopes"),
    Option("startingPosition", "text", SNAPSHOT, "where a new query begins: `snapshot`, `now`, `slot`, or a position such as `0/16B3748`"),
    Option("endingPosition", "position", "", "a position beyond which nothing is read; `penstock.available_now` sets it"),
    Option("slot", "name", "", "the replication slot; by default named after the database and the tables"),
    Option("publication", "name", "", "the publication; by default it has the slot's name"),
    Option("spool", "directory", "", "where changes wait for Spark; all executors must reach it. By default in the user's state directory"),
    Option("consumer", "text", "", "who reads the spool; by default named after the tables. Queries that share a spool need one each"),
    Option("process", "choice", "embedded", "`separate` if `penstock capture` fills the spool, so that the query only follows it"),
    Option("columns", "list", "", "`spark.read` only: the columns to read; by default all"),
    Option("maxRowsPerBatch", "count", str(_ADMISSION.rows), "the most rows of one batch, in whole segments of the spool"),
    Option("maxBytesPerBatch", "count", str(_ADMISSION.bytes), "the most bytes of one batch, of the spool or of the table's heap"),
    Option("maxTransactionsPerBatch", "count", "", "the most transactions of one batch; by default as many as there are"),
    Option("chunkBytes", "count", str(32 << 20), "how much of a table's heap one task reads"),
    Option("snapshotHoldSeconds", "seconds", "3600.0", "how long one snapshot is held open on the source before another takes its place"),
    Option("numeric", "text", _TYPES.numeric, "what numeric without a bound becomes: `decimal(p,s)`, or `string`"),
    Option(
        "onUnrepresentable",
        "choice",
        _TYPES.on_unrepresentable,
        "what a value becomes that its type cannot hold: `null`, or an `error`",
    ),
    Option("confirm", "choice", Confirm.APPLIED.value, "what the source may forget: what Spark has `applied`, or what is `spooled`"),
    Option("maxRetainedWal", "count", "", "bytes of WAL that the slot may retain before `applied` gives way to `spooled`"),
    Option("failover", "boolean", "false", "whether standbys keep a copy of the slot; Postgres 17 and later"),
    Option("oldRows", "boolean", "false", "rows as they were before an update or a delete too, of tables with REPLICA IDENTITY FULL"),
    _limit("segmentRows", "count", "segment_rows", "the most rows of one segment of the spool"),
    _limit("segmentBytes", "count", "segment_bytes", "the most bytes of one segment of the spool"),
    _limit("segmentSeconds", "seconds", "segment_seconds", "how long changes wait for others before they are sealed"),
    _limit("sealSeconds", "seconds", "seal_seconds", "the least time between two segments"),
    _limit("quietSeconds", "seconds", "quiet_seconds", "how often, at most, an idle database moves the position forward"),
    _limit("bufferBytes", "count", "buffer_bytes", "how much may wait in memory"),
    _limit("spoolBytes", "count", "spool_bytes", "how large the spool may grow before receiving pauses"),
    _limit("silenceSeconds", "seconds", "silence_seconds", "how long the server may say nothing before the connection counts as lost"),
    _limit("watchSeconds", "seconds", "watch_seconds", "how often the server is asked how its log and the slot stand"),
    _limit("longTransactionSeconds", "seconds", "long_transaction_seconds", "from what age on an open transaction is named"),
)

_BY_NAME = {option.name.lower(): option for option in OPTIONS}
_DEFAULTS = {name: option.default for name, option in _BY_NAME.items() if option.default}


def check_options(options: Mapping[str, str], *required: str) -> dict[str, str]:
    """The options under folded names, without those left empty; or the error that names what is unknown, or all that is missing."""
    given = {name.lower(): value for name, value in options.items() if value not in (None, "")}
    for name in options:
        if name.lower() not in _BY_NAME:
            raise _unknown(name)
    needed = [option.name for option in OPTIONS if option.is_required or option.name in required]
    missing = [name for name in needed if name.lower() not in given]
    if missing:
        these = " and ".join(repr(name) for name in missing)
        raise ConfigError(
            f"the option{'s' if len(missing) > 1 else ''} {these} {'are' if len(missing) > 1 else 'is'} missing",
            hint=" ".join(f'.option("{name}", …)' for name in missing),
        )
    if "table" in given and "tables" in given:
        raise ConfigError("the options 'table' and 'tables' are both given", hint="one table gives typed rows, several give envelopes")
    return given


def default(name: str) -> str:
    return _DEFAULTS[name.lower()]


def count_option(given: Mapping[str, str], name: str) -> int | None:
    """A whole number above 0, the default, or None if there is neither."""
    text = given.get(name.lower()) or _DEFAULTS.get(name.lower())
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) == 0:
        raise ConfigError(f"the option {name!r} is not a number above 0: {text!r}", hint=_hint(name))
    return int(text)


def seconds_option(given: Mapping[str, str], name: str) -> float:
    text = given.get(name.lower()) or _DEFAULTS[name.lower()]
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"the option {name!r} is not a number of seconds: {text!r}", hint=_hint(name))
    return value


def options_page() -> str:
    """The reference page."""
    lines = [
        "# Options of the Spark source",
        "",
        "<!-- Generated from src/penstock/spark/options.py by `make docs`. -->",
        "",
        'For `spark.readStream.format("postgres-cdc")` and `spark.read.format("postgres-cdc")`. Upper and lower case are the same.',
        "An option that is not listed here is an error. [The guide](../guides/spark-source.md) says how they work together.",
        "",
        "| option | type | default | |",
        "|---|---|---|---|",
    ]
    for option in OPTIONS:
        shown = "required" if option.is_required else f"`{option.default}`" if option.default else ""
        lines.append(f"| `{option.name}` | {option.kind} | {shown} | {option.help} |")
    return "\n".join(lines) + "\n"


def undeclared_options() -> set[str]:
    """What a capture can be told and no option says; a test holds what that may be."""
    return set(CaptureSettings.OPTION_NAMES - _BY_NAME.keys())


def _hint(name: str) -> str:
    standing = _DEFAULTS.get(name.lower())
    return f"the default is {standing}" if standing else "leave it out to have no limit"


def _unknown(name: str) -> ConfigError:
    if name.lower() == "capture":
        return ConfigError("who captures is said by the option 'process' now", hint='.option("process", "separate"), or leave it out')
    near = [_BY_NAME[each].name for each in difflib.get_close_matches(name.lower(), _BY_NAME, n=3)]
    hint = f"did you mean {' or '.join(near)}?" if near else "docs/reference/source-options.md lists all there are"
    return ConfigError(f"there is no option {name!r}", hint=hint)
