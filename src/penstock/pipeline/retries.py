"""What a running pipeline is trying again at the moment, written to the state directory for `penstock status`.

A table whose epoch failed says so in its own state. This document has the rest: the pipeline itself, snapshots, resyncs and maintenance.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.spool import storage

FILE = "retries.json"
PIPELINE = "pipeline"


@dataclass(frozen=True, slots=True)
class Retry:
    """Something that failed and is tried again."""

    subject: str
    reason: str
    remedy: str | None
    failures: int
    """In a row."""
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
        return f"{self.subject}: {self.reason}; failed {self.failures} times in a row, next attempt {self.next_attempt:%H:%M:%S} UTC{fix}"


class RetryLog:
    """Used by several threads of the run. A disk that cannot take the document is no reason to stop: it is for people."""

    def __init__(self, state: Path | None = None) -> None:
        """Without a state directory nothing is written."""
        self._state = state
        self._retries: dict[str, Retry] = {}
        self._lock = threading.Lock()

    def note(self, subject: str, error: PenstockError, failures: int, pause_seconds: float) -> None:
        """`subject` failed once more, and is tried again after the pause."""
        due = datetime.now(UTC) + timedelta(seconds=pause_seconds)
        with self._lock:
            self._retries[subject] = Retry(subject, f"{error.code}: {error.message}", error.hint, failures, due)
            self._write()

    def clear(self, subject: str) -> None:
        """It succeeded, or is not tried any more."""
        if subject in self._retries:
            with self._lock:
                self._retries.pop(subject, None)
                self._write()

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the pipeline runs, and nothing else of its name does. What a run that was killed left does not count, before or after."""
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
        if self._state is None or (not self._retries and not (self._state / FILE).exists()):
            return
        document = {"retries": [retry.as_document() for retry in self._retries.values()]}
        with suppress(OSError):
            storage.replace_bytes(self._state / FILE, json.dumps(document, indent=2).encode())


def load_retries(state: Path) -> tuple[Retry, ...]:
    """As the run wrote them last; none if they cannot be read."""
    try:
        data = storage.read_bytes(state / FILE)
        found: list[dict[str, Any]] = [] if data is None else json.loads(data)["retries"]
        return tuple(
            Retry(each["subject"], each["reason"], each["remedy"], each["failures"], datetime.fromisoformat(each["next_attempt"]))
            for each in found
        )
    except (OSError, ValueError, KeyError, TypeError):
        return ()
