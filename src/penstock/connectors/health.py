"""From what is known about a connector to one of four states. Pure: the thresholds are data, and nobody is asked."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.contracts.connector import HealthStatus
from penstock.errors import PenstockError, Recovery
from penstock.lag import CaptureLag


@dataclass(frozen=True, slots=True)
class HealthThresholds:
    """From where on a connector is degraded, and from where on unhealthy."""

    degraded_lag_bytes: int = 256 << 20
    unhealthy_lag_bytes: int = 4 << 30
    unhealthy_errors: int = 5
    """Without any progress in between; one is enough to be degraded."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """What is known at one moment."""

    trouble: BaseException | None = None
    """Why nothing comes now."""
    errors: int = 0
    """How many errors there were since the last progress."""
    behind_bytes: int | None = None
    """How far what has been given out is behind the source."""
    lag: CaptureLag | None = None
    """The last look at the server."""


def assess(vitals: Vitals, thresholds: HealthThresholds) -> HealthStatus:
    """The worst that there is to say; of several things of one kind, the first."""
    unhealthy = _unhealthy(vitals, thresholds)
    if unhealthy is not None:
        return HealthStatus.unhealthy(unhealthy)
    degraded = _degraded(vitals, thresholds)
    return HealthStatus.HEALTHY if degraded is None else HealthStatus.degraded(degraded)


def _unhealthy(vitals: Vitals, thresholds: HealthThresholds) -> str | None:
    trouble, lag = vitals.trouble, vitals.lag
    if trouble is not None and not _passes(trouble):
        return _named(trouble)
    if trouble is not None and vitals.errors >= thresholds.unhealthy_errors:
        return f"{vitals.errors} errors without progress, the last one {_named(trouble)}"
    if lag is not None and lag.wal_status == "lost":
        return "the slot has been invalidated"
    if vitals.behind_bytes is not None and vitals.behind_bytes > thresholds.unhealthy_lag_bytes:
        return f"{vitals.behind_bytes} bytes behind the source, more than {thresholds.unhealthy_lag_bytes}"
    return None


def _degraded(vitals: Vitals, thresholds: HealthThresholds) -> str | None:
    if vitals.trouble is not None:
        return _named(vitals.trouble)
    if vitals.behind_bytes is not None and vitals.behind_bytes > thresholds.degraded_lag_bytes:
        return f"{vitals.behind_bytes} bytes behind the source, more than {thresholds.degraded_lag_bytes}"
    if vitals.lag is not None and vitals.lag.warnings:
        return vitals.lag.warnings[0]
    return None


def _passes(trouble: BaseException) -> bool:
    return isinstance(trouble, PenstockError) and trouble.recovery is Recovery.RETRY


def _named(trouble: BaseException) -> str:
    """Of an error that is not ours only the kind: its text may hold anything."""
    return f"{trouble.code}: {trouble.message}" if isinstance(trouble, PenstockError) else type(trouble).__name__
