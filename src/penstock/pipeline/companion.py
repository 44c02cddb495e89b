"""The capture as the pipeline that reads behind it sees it: the one that Spark runs in the reader's process, or one of its own.

The two differ in who ends it, and in what its absence means: an embedded capture begins and ends with the query, and another one in its
place is a mistake; a separate one comes and goes by itself, and the pipeline waits for it.
"""

from __future__ import annotations

import time

from penstock.capture.following import check_shared, missing_capture
from penstock.errors import CaptureMissingError, SpoolLockedError
from penstock.pipeline.config import PipelineConfig
from penstock.spool.lock import SpoolLock, is_locked
from penstock.spool.status import load_status

_POLL_SECONDS = 0.1
_END_SECONDS = 10.0
_PATIENCE_SECONDS = 60.0


class CaptureCompanion:
    """One for an attempt of a run."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._missing: CaptureMissingError | None = None
        self._missing_since = 0.0

    @property
    def is_separate(self) -> bool:
        return self._config.source.process == "separate"

    def check(self) -> None:
        """Before anything starts: a separate capture must be one that fits, and an embedded one must be the only one."""
        config = self._config
        if self.is_separate:
            check_shared(config.spool, config.slot, config.origin, config.type_policy)
        elif (other := self._wait_for_end()) is not None:
            hint = "stop it; or set source.process: separate, if that is a `penstock capture` for several pipelines"
            raise SpoolLockedError(other.message, hint=hint)

    def trouble(self) -> str | None:
        """Why nothing comes now; None while all is well. Captures try again by themselves."""
        if self.is_separate:
            self._look()
            if self._missing is not None:
                return f"{self._missing.message}: {self._missing.hint}"
        status = load_status(self._config.spool)
        return status.failure.message if status is not None and status.failure is not None else None

    def check_patience(self) -> None:
        """For a run that is to end by itself: raise when there has been no capture for a minute."""
        if self._missing is not None and time.monotonic() - self._missing_since > _PATIENCE_SECONDS:
            raise self._missing

    def settle(self) -> None:
        """After the query. Spark ends the capture's process and does not wait for it; the last confirmation comes from there."""
        if not self.is_separate:
            self._wait_for_end()

    def _look(self) -> None:
        before, self._missing = self._missing, missing_capture(self._config.spool)
        if before is None:
            self._missing_since = time.monotonic()

    def _wait_for_end(self) -> SpoolLockedError | None:
        """Wait, at most ten seconds, until nobody writes to the spool; gives back who still does."""
        deadline = time.monotonic() + _END_SECONDS
        while is_locked(self._config.spool):
            try:
                with SpoolLock(self._config.spool):
                    return None
            except SpoolLockedError as error:
                if time.monotonic() > deadline:
                    return error
                time.sleep(_POLL_SECONDS)
        return None
