"""The changes of one table, pushed into a buffer as they come."""

from __future__ import annotations

import logging
import threading

from penstock.capture.records.buffer import RecordBuffer
from penstock.capture.records.building import RecordBuilder, place_of
from penstock.capture.records.ledger import AckLedger, let_go
from penstock.capture.records.places import ChangePlace
from penstock.contracts.capture import Change, ChangeStream
from penstock.errors import NoRowsError

_log = logging.getLogger(__name__)


class RecordStream:
    """Owns the capture's stream, and the thread that follows it into `buffer`. Changes up to `after` are passed over, not acknowledged."""

    def __init__(self, changes: ChangeStream, builder: RecordBuilder, ledger: AckLedger, after: ChangePlace) -> None:
        self.buffer = RecordBuffer()
        self._changes = changes
        self._builder = builder
        self._ledger = ledger
        self._after = after
        self._has_begun = False
        self._thread = threading.Thread(target=self._run, name="penstock-records", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """What has been confirmed is durable when this returns."""
        self.buffer.teardown()
        self._changes.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            for change in self._changes:
                if not self._has_begun:
                    self._begin()
                self._take(change)
        except NoRowsError:
            _log.debug("record stream closed")
        except BaseException as error:  # noqa: BLE001 - the thread's edge: whoever reads raises it
            self.buffer.fail(error)

    def _begin(self) -> None:
        """A capture gives out nothing before it is the only one. Until then another process may have acknowledged, and so let go of, what
        comes after the place from which we are to go on."""
        self._has_begun = True
        acked = self._ledger.refresh()
        if self._after < acked:
            raise let_go(self._after, acked)

    def _take(self, change: Change) -> None:
        if change.event.table != self._builder.table:
            # The publication holds it for somebody else's sake.
            change.ack.confirm()
            return
        place = place_of(change)
        self._ledger.deliver(place, change.ack)
        if place > self._after:
            self.buffer.push(self._builder.record(change))
