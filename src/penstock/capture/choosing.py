"""From settings to the thread that fills the spool: by the log, by asking tables, or by what triggers wrote down."""

from __future__ import annotations

from penstock.capture.feeding import FeedCapture
from penstock.capture.polling_feed import PollingFeed
from penstock.capture.polling_settings import PollingSettings
from penstock.capture.settings import CaptureSettings
from penstock.capture.spooling import SpoolCapture
from penstock.capture.thread import CaptureThread
from penstock.capture.trigger_feed import TriggerFeed
from penstock.capture.trigger_settings import TriggerSettings


def open_capture(settings: CaptureSettings) -> CaptureThread:
    """Not started yet."""
    polling = polling_settings(settings)
    if polling is not None:
        return FeedCapture(PollingFeed(polling), polling.feed)
    trigger = trigger_settings(settings)
    return SpoolCapture(settings) if trigger is None else FeedCapture(TriggerFeed(trigger), trigger.feed)


def trigger_settings(settings: CaptureSettings) -> TriggerSettings | None:
    """None where changes do not come by triggers."""
    if not settings.by_triggers:
        return None
    return TriggerSettings(settings.address, settings.slot, settings.spool, settings.limits, settings.types, settings.confirm)


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
