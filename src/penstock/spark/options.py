"""Options of `format("postgres-cdc")`, and the limits on what one batch reads.

Spark 4.2 asks the reader for its default limit, and passes the limit that the trigger allows to
`latestOffset`. Spark 4.1 passes no limit, so the reader applies the limit from the options. This module
defines those classes of Spark 4.2 that Spark 4.1 lacks, so that one reader works with all versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from penstock.capture.settings import CAPTURE_OPTIONS, DSN, PASSWORD, PASSWORD_FILE
from penstock.errors import ConfigError
from penstock.options import COUNT, SECONDS, TEXT, Option, OptionTable, declared_options, read_fields

try:  # Spark 4.2 and later
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:

    @dataclass
    class ReadAllAvailable:  # type: ignore[no-redef]
        """Read all available rows, regardless of the options."""

    @dataclass
    class ReadMaxRows:  # type: ignore[no-redef]
        """Read at most this number of rows."""

        max_rows: int

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Marks a reader that can stop at the data available when the query started."""


__all__ = ["Admission", "ReadAllAvailable", "ReadMaxRows", "SupportsTriggerAvailableNow"]


@dataclass(frozen=True, slots=True)
class Admission:
    """Limits on one batch. A batch consists of whole segments of the spool, and has at least one even if that
    exceeds a limit.

    None means no limit.
    """

    rows: Annotated[
        int | None,
        Option(
            "Maximum rows of one batch; a batch has whole segments of the spool, at least one.",
            COUNT,
            name="maxRowsPerBatch",
        ),
    ] = 1_000_000
    bytes: Annotated[
        int | None,
        Option(
            "Maximum bytes of one batch, of the spool or, in a snapshot, of the heap.",
            COUNT,
            name="maxBytesPerBatch",
        ),
    ] = 1 << 30
    transactions: Annotated[
        int | None,
        Option(
            "Maximum transactions of one batch. Default: no limit.", COUNT, name="maxTransactionsPerBatch"
        ),
    ] = None

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Admission:
        """Read the limits; names are case-insensitive."""
        return cls(**read_fields(cls, {name.lower(): value for name, value in options.items()}))

    def under(self, limit: Any) -> Admission:
        """These limits, overridden by Spark's `limit`; Spark 4.1 passes None."""
        if isinstance(limit, ReadAllAvailable):
            return Admission(None, None, None)
        if isinstance(limit, ReadMaxRows):
            return replace(self, rows=limit.max_rows)
        return self


SNAPSHOT, NOW, SLOT = "snapshot", "now", "slot"
"""Values of `startingPosition`, in addition to positions such as 0/16B3748."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of the Spark source that are not options of a capture."""

    table: Annotated[
        str, Option("The one table to read; its rows have typed columns.", TEXT.named("schema.name"))
    ] = ""
    tables: Annotated[
        str,
        Option(
            "Several tables, by names or patterns, such as `public.*, sales.orders`; rows are envelopes.",
            TEXT.named("list"),
        ),
    ] = ""
    starting_position: Annotated[
        str, Option("Where a new query starts: `snapshot`, `now`, `slot`, or a position such as `0/16B3748`.")
    ] = SNAPSHOT
    ending_position: Annotated[
        str,
        Option(
            "Position at which the query stops reading; `penstock.available_now` sets it.",
            TEXT.named("position"),
        ),
    ] = ""
    consumer: Annotated[
        str,
        Option(
            "Name of this query as a reader of the spool, different for each query that shares it. "
            "Default: derived from the tables."
        ),
    ] = ""
    columns: Annotated[
        str, Option("`spark.read` only: the columns to read. Default: all.", TEXT.named("list"))
    ] = ""
    chunk_bytes: Annotated[int, Option("Heap bytes that one task reads in a snapshot.", COUNT)] = 32 << 20
    snapshot_hold_seconds: Annotated[
        float,
        Option(
            "Maximum time to hold one exported snapshot open on the source; a stream then continues with a "
            "new one.",
            SECONDS,
        ),
    ] = 3600.0

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SourceOptions:
        """Read the options; the names in `given` are lower-case. Raises ConfigError if it has both `table`
        and `tables`.
        """
        if "table" in given and "tables" in given:
            raise ConfigError(
                "the options 'table' and 'tables' are both given",
                hint="give one of them: `table` reads typed rows, `tables` reads envelopes",
            )
        return cls(**read_fields(cls, given))


_DERIVED = {
    "slot": "Replication slot; the default name is derived from the database and the tables.",
    "spool": "Spool directory, which all executors must be able to access. Default: in the user's state "
    "directory.",
}
"""Descriptions of options that a capture requires and for which the source has a default."""


def _capture_options() -> Iterator[Option]:
    own = {"dsn", "password", *(option.key for option in declared_options(SourceOptions))}
    for option in CAPTURE_OPTIONS.options:
        # There is no option for a password file: executors would read it, but it may exist only on the
        # driver.
        if option.is_internal or option.key in own or option is PASSWORD_FILE:
            continue
        if option.name in _DERIVED:
            option = replace(option, description=_DERIVED[option.name], is_required=False)  # noqa: PLW2901
        yield option


SOURCE_OPTIONS = OptionTable(
    (
        DSN,
        replace(PASSWORD, description="Password of the role; Spark redacts it in plans and in the UI."),
        *declared_options(SourceOptions),
        *declared_options(Admission),
        *_capture_options(),
    ),
    page="docs/reference/source-options.md",
    example='.option("{name}", …)',
)


def check_options(options: Mapping[str, str]) -> dict[str, str]:
    """Check the names of the options; returns the options with lower-case names, without empty values."""
    if any(name.lower() == "capture" for name in options):
        raise ConfigError(
            "the option 'capture' was renamed to 'process'",
            hint='use .option("process", "separate"), or omit the option',
        )
    return SOURCE_OPTIONS.check(options)
