"""How much one batch takes in, and the names under which Spark speaks of it.

Spark 4.2 asks the reader for its limit and hands back the one that the trigger allows; Spark 4.1 knows no limits, so there the reader keeps
to its own. The names that 4.1 lacks are stood in for here, so that one reader serves all versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import ConfigError

try:  # Spark 4.2 and later
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:

    @dataclass
    class ReadAllAvailable:  # type: ignore[no-redef]
        """Everything that is there, whatever the options say."""

    @dataclass
    class ReadMaxRows:  # type: ignore[no-redef]
        """Not more rows than that."""

        max_rows: int

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Marks a reader that stops at what was there when it started."""


__all__ = ["Admission", "ReadAllAvailable", "ReadMaxRows", "SupportsTriggerAvailableNow"]


@dataclass(frozen=True, slots=True)
class Admission:
    """The most that one batch takes in, counted in whole segments; at least one segment is always admitted. None is no limit."""

    rows: int | None = 1_000_000
    bytes: int | None = 1 << 30
    transactions: int | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Admission:
        """Read `maxRowsPerBatch`, `maxBytesPerBatch` and `maxTransactionsPerBatch`. Spark folds their names to lower case."""
        folded = {name.lower(): value for name, value in options.items()}
        default = cls()
        return cls(
            _count(folded, "maxRowsPerBatch", default.rows),
            _count(folded, "maxBytesPerBatch", default.bytes),
            _count(folded, "maxTransactionsPerBatch", default.transactions),
        )

    def under(self, limit: Any) -> Admission:
        """What is left of it when Spark asks for `limit`; None from a Spark that knows no limits."""
        if isinstance(limit, ReadAllAvailable):
            return Admission(None, None, None)
        if isinstance(limit, ReadMaxRows):
            return replace(self, rows=limit.max_rows)
        return self


def _count(folded: Mapping[str, str], name: str, default: int | None) -> int | None:
    text = folded.get(name.lower())
    if text is None:
        return default
    if not text.strip().isdecimal() or int(text) == 0:
        raise ConfigError(f"the option {name!r} is not a number above 0: {text!r}", hint=f"the default is {default or 'no limit'}")
    return int(text)
