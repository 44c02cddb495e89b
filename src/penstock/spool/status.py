"""The capture's heartbeat: how it is doing, for readers in other processes. Never row values, never a DSN."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, Recovery, SpoolCorruptError
from penstock.lag import CaptureLag, OpenTransaction
from penstock.position import Position
from penstock.spool import storage
from penstock.spool.layout import FORMAT, SpoolLayout
from penstock.spool.manifest import parse_document


@dataclass(frozen=True, slots=True)
class CaptureFailure:
    """An error as another process can show it."""

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
    bytes_total: int
    updated_at: datetime
    failure: CaptureFailure | None = None
    """What stands in the way now; None once the capture goes on."""
    confirms: str = "applied"
    """What is confirmed to the server: what the targets have applied, or what is spooled."""
    confirmed: Position = Position.ZERO
    """Up to where the server has been told that nothing is needed any more; zero if nothing has been said yet."""
    waits_for: tuple[OpenTransaction, ...] = ()
    """While the slot is being created: the transactions that must end first."""
    lag: CaptureLag | None = None
    """As of the last look at the server; None before the first."""
    numeric: str | None = None
    """What numeric without a bound becomes in the spool, or `text` if everything is; None where an earlier version did not say."""

    def __post_init__(self) -> None:
        if self.updated_at.tzinfo is None:
            raise ValueError("updated_at needs a time zone")

    @property
    def has_stopped(self) -> bool:
        """Whether there is an error that the capture will not get over by itself."""
        return self.failure is not None and self.failure.recovery is not Recovery.RETRY


def write_status(root: Path, status: CaptureStatus) -> None:
    """Replace the heartbeat in one step. It does not wait for the disk: after a crash of the machine an old one is as good."""
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
        "lag": None if status.lag is None else {**asdict(status.lag), "sampled_at": status.lag.sampled_at.isoformat()},
        "numeric": status.numeric,
    }
    storage.replace_bytes(SpoolLayout(root).status, json.dumps(document).encode(), durable=False)


def load_status(root: Path) -> CaptureStatus | None:
    """The last heartbeat; None if there was none, or if a crash of the machine left an empty file."""
    data = storage.read_bytes(SpoolLayout(root).status)
    if not data:
        return None
    document = parse_document(data, where="capture-status.json")
    try:
        failure = None
        if document["error"] is not None:
            recovery = Recovery(document["recovery"])
            failure = CaptureFailure(document["error_code"], document["error"], document["error_hint"], recovery)
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
        raise SpoolCorruptError("capture-status.json is not a status", hint="delete the file; a running capture writes it anew") from error


def _parse_lag(document: Mapping[str, Any] | None) -> CaptureLag | None:
    if document is None:
        return None
    sampled_at = datetime.fromisoformat(document["sampled_at"])
    holders = tuple(OpenTransaction(**each) for each in document["holders"])
    return CaptureLag(**{**document, "sampled_at": sampled_at, "holders": holders})
