"""The copy of a kept reference table that a Python worker of an executor has in memory, for as long as it lives.

It reads the table once, and from then on only what changed. Tasks ask it for a version; it waits, within bounds, until the keeper has got
there.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

from penstock.errors import EnvironmentUnfitError, ReferenceBehindError, ReferenceStoreError, find_error
from penstock.reference.files import apply_changes, load_history
from penstock.reference.history import ReferenceHistory
from penstock.reference.store import Failure, StoreState, load_state

_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.1
_ATTEMPTS = 10
_FEWEST_FORGOTTEN = 100_000


class ReferenceCopy:
    """For one thread, as a worker is."""

    def __init__(self, directory: Path, identity: str) -> None:
        self._directory = directory
        self._identity = identity
        self._history: ReferenceHistory | None = None
        self._reached = -1

    def newest(self) -> ReferenceHistory:
        """The table as the keeper has it now. Raises what ended the keeper, rather than grow old in silence."""
        state = self._load()
        if state.failure is not None:
            raise _raised(state.failure)
        return self._follow(state)

    def reaching(self, version: int, patience_seconds: float) -> ReferenceHistory:
        """The table with everything up to `version`; waits for the keeper, at most so long."""
        if self._history is not None and version <= self._reached:
            return self._history
        deadline = time.monotonic() + patience_seconds
        pause = _FIRST_PAUSE_SECONDS
        while (state := self._load()).reached < version:
            if state.failure is not None:
                raise _raised(state.failure)
            if time.monotonic() > deadline:
                raise ReferenceBehindError(
                    f"in {patience_seconds:g} s the reference table in {self._directory} came to version {state.reached}, not to {version}",
                    hint="see that the process that keeps it runs, and that stream and table have slot, publication and spool in common",
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
        return self._follow(state)

    def _load(self) -> StoreState:
        state = load_state(self._directory)
        if state is None:
            raise EnvironmentUnfitError(
                f"there is no reference table in {self._directory}, as seen from this executor",
                hint="keep it in a directory that the driver and every executor reach",
            )
        if state.identity != self._identity:
            raise ReferenceStoreError(
                f"the reference table in {self._directory} was copied anew while a query joined with it",
                hint="start the query anew; one that joins as of commits needs a new checkpoint too",
            )
        return state

    def _follow(self, state: StoreState) -> ReferenceHistory:
        for attempt in range(_ATTEMPTS):
            try:
                # Whatever goes wrong meanwhile, half of a change must not be taken for the table.
                history, self._history = self._history, None
                self._history = self._brought_to(history, state)
                self._reached = state.reached
            except FileNotFoundError:  # the keeper has folded it meanwhile
                if attempt == _ATTEMPTS - 1:
                    raise
                state = self._load()
            else:
                break
        assert self._history is not None
        return self._history

    def _brought_to(self, history: ReferenceHistory | None, state: StoreState) -> ReferenceHistory:
        if history is None or self._reached < state.floor or _is_long(history, state):
            return load_history(self._directory, state)
        apply_changes(history, self._directory, state, after=self._reached)
        return history


def _is_long(history: ReferenceHistory, state: StoreState) -> bool:
    """Whether it holds so much of the past, which the keeper has let go of, that reading the table anew is better."""
    return state.floor > history.floor and history.changes_total > max(2 * state.base_rows, _FEWEST_FORGOTTEN)


def _raised(failure: Failure) -> Exception:
    error = find_error(failure.code) or ReferenceBehindError
    return error(failure.message, hint=failure.hint)


@lru_cache(maxsize=8)
def reference_copy(directory: Path, identity: str) -> ReferenceCopy:
    """The one of this process; those of queries that are long gone make room."""
    return ReferenceCopy(directory, identity)
