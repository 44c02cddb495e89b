"""Retries in progress, stored in `retries.json` in the state directory for `penstock status`; and the check
of the format version of stored documents.

`retries.json` has the retries of the pipeline itself, of snapshots, resyncs, table reconciliation and
maintenance. A retry of a table in epochs is part of the table's state instead.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from penstock import storage
from penstock.errors import PenstockError, SpoolFormatError


def check_format(document: Mapping[str, Any], newest: int, where: Path) -> None:
    """Raise an error if the document has a format newer than `newest`. A newer version of Penstock wrote such
    a document, which is not corrupt. All older formats can be read.
    """
    written = document.get("format", 1)
    if written > newest:
        raise SpoolFormatError(
            f"{where} has format {written}; this version of penstock reads up to {newest}",
            hint="run the version of penstock that wrote it, or a newer one",
        )


FILE = "retries.json"
PIPELINE = "pipeline"


@dataclass(frozen=True, slots=True)
class Retry:
    """An action that failed and will be tried again."""

    subject: str
    reason: str
    remedy: str | None
    failures: int
    """Consecutive failures."""
    next_attempt: datetime

    def as_document(self) -> dict[str, object]:
        return {
            "subject": self.subject,
            "reason": self.reason,
            "remedy": self.remedy,
            "failures": self.failures,
            "next_attempt": self.next_attempt.isoformat(),
        }

    def describe(self) -> str:
        fix = f"; fix: {self.remedy}" if self.remedy else ""
        return (
            f"{self.subject}: {self.reason}; failed {self.failures} times in a row, next attempt "
            f"{self.next_attempt:%H:%M:%S} UTC{fix}"
        )


class RetryLog:
    """The retries in progress of a run. Several threads use it. A disk error does not stop the run, because
    the document is only for operators.
    """

    def __init__(self, state: Path | None = None) -> None:
        """`state` is the state directory. Without it, nothing is written."""
        self._state = state
        self._retries: dict[str, Retry] = {}
        self._lock = threading.Lock()

    def note(self, subject: str, error: PenstockError, failures: int, pause_seconds: float) -> None:
        """Record that `subject` failed and will be retried after the pause."""
        due = datetime.now(UTC) + timedelta(seconds=pause_seconds)
        with self._lock:
            self._retries[subject] = Retry(
                subject, f"{error.code}: {error.message}", error.hint, failures, due
            )
            self._write()

    def clear(self, subject: str) -> None:
        """Remove the entry of `subject`, which has succeeded or is not retried any more."""
        if subject in self._retries:
            with self._lock:
                self._retries.pop(subject, None)
                self._write()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Clear the log at the start and the end of a run, because a killed run leaves entries behind."""
        self._clear_all()
        try:
            yield
        finally:
            self._clear_all()

    def _clear_all(self) -> None:
        with self._lock:
            self._retries.clear()
            self._write()

    def _write(self) -> None:
        if self._state is None or (not self._retries and not storage.exists(self._state / FILE)):
            return
        document = {"retries": [retry.as_document() for retry in self._retries.values()]}
        with suppress(OSError):
            storage.put(self._state / FILE, json.dumps(document, indent=2).encode())


def load_retries(state: Path) -> tuple[Retry, ...]:
    """Load the retries as they were last written. Returns none if the file does not exist or cannot be
    read.
    """
    try:
        data = storage.read(state / FILE)
        found: list[dict[str, Any]] = [] if data is None else json.loads(data)["retries"]
        return tuple(
            Retry(
                each["subject"],
                each["reason"],
                each["remedy"],
                each["failures"],
                datetime.fromisoformat(each["next_attempt"]),
            )
            for each in found
        )
    except (OSError, ValueError, KeyError, TypeError):
        return ()
