"""From settings to the thread that fills the spool: by the log, or by asking tables."""

from __future__ import annotations

from penstock.capture.feeding import FeedCapture
from penstock.capture.polling_feed import PollingFeed
from penstock.capture.polling_settings import PollingSettings
from penstock.capture.settings import CaptureSettings
from penstock.capture.spooling import SpoolCapture
from penstock.capture.thread import CaptureThread


def open_capture(settings: CaptureSettings) -> CaptureThread:
    """Not started yet."""
    polling = polling_settings(settings)
    return SpoolCapture(settings) if polling is None else FeedCapture(PollingFeed(polling), polling.feed)


def polling_settings(settings: CaptureSettings) -> PollingSettings | None:
    """None where changes do not come by polling."""
    if settings.polling is None:
        return None
    return PollingSettings(
        settings.address,
        settings.slot,
        settings.spool,
        settings.tables,
        settings.polling,
        settings.limits,
        settings.types,
        settings.confirm,
    )
