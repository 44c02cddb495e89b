"""The capture's status file, which other processes read; and a wait until the spool reaches a position.

The status never contains row values or connection strings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock import storage
from penstock.errors import CaptureFailedError, PenstockError, Recovery, SpoolCorruptError
from penstock.lag import CaptureLag, OpenTransaction
from penstock.position import Position
from penstock.retry import poll_pauses
from penstock.spool.manifest import FORMAT, SpoolLayout, parse_document
from penstock.spool.reader import SpoolReader


@dataclass(frozen=True, slots=True)
class CaptureFailure:
    """An error of the capture, for display by other processes."""

    code: str
    message: str
    hint: str | None
    recovery: Recovery

    @classmethod
    def of(cls, error: PenstockError) -> CaptureFailure:
        return cls(error.code, error.message, error.hint, error.recovery)


@dataclass(frozen=True, slots=True)
class CaptureStatus:
    state: str
    pid: int
    received: Position
    sealed: Position
    rows_total: int
    """Rows written to the spool by this process."""
    bytes_total: int
    """Bytes received by this process from the replication slot; 0 with polling and triggers."""
    updated_at: datetime
    failure: CaptureFailure | None = None
    """The current error; None once the capture has recovered."""
    confirms: str = "applied"
    """Confirm mode: `applied` or `spooled`."""
    confirmed: Position = Position.ZERO
    """The position last confirmed to the server; zero if nothing was confirmed yet."""
    waits_for: tuple[OpenTransaction, ...] = ()
    """While the slot is created: the open transactions that must end first."""
    lag: CaptureLag | None = None
    """The lag at the last health check; None before the first."""
    numeric: str | None = None
    """The type of unbounded `numeric` in the spool, or `text` if all columns are text; None in files of
    earlier versions.
    """

    def __post_init__(self) -> None:
        if self.updated_at.tzinfo is None:
            raise ValueError("updated_at needs a time zone")

    @property
    def has_stopped(self) -> bool:
        """Whether the error needs an operator."""
        return self.failure is not None and self.failure.recovery is not Recovery.RETRY


def write_status(root: Path, status: CaptureStatus) -> None:
    """Replace the status file atomically.

    It is not durable: after a machine crash, an older status is acceptable.
    """
    failure = status.failure
    document = {
        "format": FORMAT,
        "state": status.state,
        "pid": status.pid,
        "received": str(status.received),
        "sealed": str(status.sealed),
        "rows_total": status.rows_total,
        "bytes_total": status.bytes_total,
        "updated_at": status.updated_at.isoformat(),
        "error": None if failure is None else failure.message,
        "error_code": None if failure is None else failure.code,
        "error_hint": None if failure is None else failure.hint,
        "recovery": None if failure is None else failure.recovery.value,
        "confirms": status.confirms,
        "confirmed": str(status.confirmed),
        "waits_for": [asdict(each) for each in status.waits_for],
        "lag": None
        if status.lag is None
        else {**asdict(status.lag), "sampled_at": status.lag.sampled_at.isoformat()},
        "numeric": status.numeric,
    }
    storage.put(SpoolLayout(root).status, json.dumps(document).encode(), durable=False)


def load_status(root: Path) -> CaptureStatus | None:
    """Return the last status; None if no file exists, or if a machine crash left an empty one."""
    data = storage.read(SpoolLayout(root).status)
    if not data:
        return None
    document = parse_document(data, where="capture-status.json")
    try:
        failure = None
        if document["error"] is not None:
            recovery = Recovery(document["recovery"])
            failure = CaptureFailure(
                document["error_code"], document["error"], document["error_hint"], recovery
            )
        return CaptureStatus(
            state=document["state"],
            pid=document["pid"],
            received=Position.parse(document["received"]),
            sealed=Position.parse(document["sealed"]),
            rows_total=document["rows_total"],
            bytes_total=document["bytes_total"],
            updated_at=datetime.fromisoformat(document["updated_at"]),
            failure=failure,
            confirms=document.get("confirms", "applied"),
            confirmed=Position.parse(document.get("confirmed", "0/0")),
            waits_for=tuple(OpenTransaction(**each) for each in document.get("waits_for", ())),
            lag=_parse_lag(document.get("lag")),
            numeric=document.get("numeric"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SpoolCorruptError(
            "capture-status.json is not a status", hint="delete the file; a running capture rewrites it"
        ) from error


def _parse_lag(document: Mapping[str, Any] | None) -> CaptureLag | None:
    if document is None:
        return None
    sampled_at = datetime.fromisoformat(document["sampled_at"])
    holders = tuple(OpenTransaction(**each) for each in document["holders"])
    return CaptureLag(**{**document, "sampled_at": sampled_at, "holders": holders})


_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.05


def wait_for_end(
    reader: SpoolReader,
    position: Position,
    *,
    timeout_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Position | None:
    """Wait until the spool reaches `position`. Returns the end of the spool, which is less than `position`
    after a timeout, or None if the spool is empty.

    Raises CaptureFailedError if the capture has stopped with an error and the spool does not reach
    `position`.
    """
    deadline = clock() + timeout_seconds
    pauses = poll_pauses(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
    while True:
        end = reader.end
        if end is not None and end >= position:
            return end
        _raise_if_stopped(reader)
        left = deadline - clock()
        if left <= 0:
            return end
        sleep(min(next(pauses), left))


def _raise_if_stopped(reader: SpoolReader) -> None:
    status = load_status(reader.root)
    if status is not None and status.failure is not None and status.has_stopped:
        raise CaptureFailedError(
            f"the capture has stopped: {status.failure.code}: {status.failure.message}",
            hint=status.failure.hint,
        )
