"""How long a Delta table itself asks for what is gone from it to be kept, in its properties.

They are intervals as Spark writes them: `interval 30 days`, `interval 1 week 12 hours`. One that is not understood counts as for ever.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_LOG = "delta.logRetentionDuration"
_FILES = "delta.deletedFileRetentionDuration"
_FILES_SECONDS = 7 * 86400.0
_INTERVAL = re.compile(r"\s*(?:interval\s+)?((?:\d+\s+[a-z]+\s*)+)")
_PART = re.compile(r"(\d+)\s+([a-z]+)")
_SECONDS = {
    "week": 604800.0,
    "day": 86400.0,
    "hour": 3600.0,
    "minute": 60.0,
    "second": 1.0,
    "millisecond": 1e-3,
    "microsecond": 1e-6,
}


def asked_seconds(properties: Mapping[str, str]) -> float:
    """How far back readers are to be able to go, as far as the table says anything about it; 0 if it does not."""
    return max((parse_interval(properties[name]) for name in (_LOG, _FILES) if name in properties), default=0.0)


def removed_seconds(properties: Mapping[str, str]) -> float:
    """How long Delta itself needs to know of a file that it is gone."""
    return parse_interval(properties[_FILES]) if _FILES in properties else _FILES_SECONDS


def parse_interval(text: str) -> float:
    """In seconds. Months and years have no length; Delta does not take them either."""
    match = _INTERVAL.fullmatch(text.lower())
    parts = [(int(count), unit.removesuffix("s")) for count, unit in _PART.findall(match[1])] if match else []
    if not parts or any(unit not in _SECONDS for _, unit in parts):
        return math.inf
    return sum(count * _SECONDS[unit] for count, unit in parts)
