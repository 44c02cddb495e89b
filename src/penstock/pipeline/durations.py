"""Durations as the configuration writes them: `500 ms`, `1 second`, `2 hours`, `7 days`."""

from __future__ import annotations

import re

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|millisecond|s|second|min|minute|h|hour|d|day)s?\s*")
_SECONDS = {
    "ms": 0.001,
    "millisecond": 0.001,
    "s": 1,
    "second": 1,
    "min": 60,
    "minute": 60,
    "h": 3600,
    "hour": 3600,
    "d": 86400,
    "day": 86400,
}


def parse_seconds(duration: str) -> float:
    match = _DURATION.fullmatch(duration)
    if match is None:
        raise ValueError("write a duration such as '1 second' or '500 ms'")
    return float(match[1]) * _SECONDS[match[2]]


def checked_duration(value: str) -> str:
    """For a field of the configuration."""
    parse_seconds(value)
    return value
