"""From "everything up to here" to the acknowledgements of a stream, one by one.

Of each transaction only the last acknowledgement is kept, and those before it are confirmed as they come: a capture resumes from whole
transactions alone, so nothing moves before the last one is confirmed. Memory goes by the number of transactions that wait.

How far the caller has acknowledged is written down *before* it is confirmed. The slot cannot tell: it also moves over ground where there
was nothing. So a position from before that, out of a backup perhaps, is found out, and what it lacks is not passed over.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from pathlib import Path

from penstock.capture.records.places import ChangePlace, SnapshotPlace, parse_place
from penstock.contracts.capture import Ack
from penstock.contracts.records import RecordPosition
from penstock.errors import NoRowsError, RecordGoneError, SpoolCorruptError, SpoolError
from penstock.position import Position
from penstock.spool import storage
from penstock.spool.layout import FORMAT, SpoolLayout
from penstock.spool.manifest import parse_document

_SETTLE_SECONDS = 0.1


class AckLedger:
    """`deliver` is for the thread that follows the stream; everything else for any thread."""

    def __init__(self, spool: Path) -> None:
        self._note = SpoolLayout(spool).records
        self._lock = threading.Lock()
        self._acked = self._settled = _load(self._note)
        self._waiting: deque[tuple[ChangePlace, Ack]] = deque()
        self._settled_at = 0.0
        self._is_closed = False

    @property
    def acked(self) -> ChangePlace:
        """Everything up to here has been acknowledged, in this run or an earlier one."""
        with self._lock:
            return self._acked

    @property
    def waiting(self) -> int:
        """How many acknowledgements are kept: what the memory goes by."""
        with self._lock:
            return len(self._waiting)

    def deliver(self, place: ChangePlace, ack: Ack) -> None:
        """Keep what has to be confirmed once `place` is acknowledged. Places come in order."""
        with self._lock:
            if place <= self._settled:
                ack.confirm()
                return
            if self._waiting and self._waiting[-1][0].position == place.position:
                self._waiting.pop()[1].confirm()
            self._waiting.append((place, ack))

    def ack(self, place: ChangePlace) -> None:
        with self._lock:
            if self._is_closed:
                raise NoRowsError("the source is closed, and cannot be told any more", hint="acknowledge before teardown; it comes again")
            self._acked = max(self._acked, place)
        self.settle()

    def settle(self, *, at_once: bool = False) -> None:
        """Write down how far the caller is, then confirm it; a few times a second at most, unless it has to be at once."""
        with self._lock:
            now = time.monotonic()
            if self._acked > self._settled and (at_once or now - self._settled_at >= _SETTLE_SECONDS):
                self._acked = max(self._acked, _load(self._note))  # it never goes back, whoever has written it meanwhile
                _store(self._note, self._acked)
                self._settled, self._settled_at = self._acked, now
            while self._waiting and self._waiting[0][0] <= self._settled:
                self._waiting.popleft()[1].confirm()

    def refresh(self) -> ChangePlace:
        """How far whoever had the spool before us has acknowledged."""
        with self._lock:
            self._acked = max(self._acked, _load(self._note))
            return self._acked

    def close(self) -> None:
        """Write down the rest, and take no more."""
        with self._lock:
            self._is_closed = True
        self.settle(at_once=True)

    def restart(self) -> None:
        """The stream is over, and what it delivered comes again."""
        with self._lock:
            self._waiting.clear()


def let_go(after: ChangePlace, acked: ChangePlace) -> RecordGoneError:
    return RecordGoneError(
        f"what follows {after.render()} was acknowledged up to {acked.render()}, and the source may have let go of it",
        hint="go on from there, if that is where you are; otherwise empty the target and read from the start, with None",
    )


def _load(path: Path) -> ChangePlace:
    data = storage.read_bytes(path)
    if data is None:
        return ChangePlace(Position.ZERO)
    try:
        place = parse_place(RecordPosition(str(parse_document(data, where=path.name)["acked"])))
    except (KeyError, RecordGoneError) as error:
        raise _corrupt(path) from error
    if isinstance(place, SnapshotPlace):
        raise _corrupt(path)
    return place


def _store(path: Path, place: ChangePlace) -> None:
    document = {"format": FORMAT, "acked": str(place.render())}
    try:
        storage.replace_bytes(path, json.dumps(document).encode())
    except OSError as error:
        raise SpoolError(f"the spool cannot be written: {error}") from error


def _corrupt(path: Path) -> SpoolCorruptError:
    return SpoolCorruptError(f"{path.name} holds no position", hint=f"remove {path.name} from the spool: it is written anew")
