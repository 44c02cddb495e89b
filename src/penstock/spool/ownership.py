"""Ownership of a spool: the slot and database system it belongs to, and the locks of its writer and readers.

A spool belongs to one slot of one database system until it is deleted. It has one writer, and one reader per
consumer name.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from typing_extensions import override

from penstock import storage
from penstock.errors import (
    ConsumerBusyError,
    LockWaitError,
    PenstockError,
    SpoolCorruptError,
    SpoolFormatError,
    SpoolLockedError,
)
from penstock.spool.manifest import FORMAT, SpoolLayout, parse_document
from penstock.storage.locks import FileLock, is_file_lock_held


@dataclass(frozen=True, slots=True)
class CaptureIdentity:
    slot: str
    publication: str
    system_identifier: str
    timeline: int


def load_identity(root: Path) -> CaptureIdentity | None:
    """Return the capture that the spool belongs to; None for a new spool."""
    data = storage.read(SpoolLayout(root).identity)
    if data is None:
        return None
    document = parse_document(data, where="capture.json")
    try:
        return CaptureIdentity(
            slot=str(document["slot"]),
            publication=str(document["publication"]),
            system_identifier=str(document["system_identifier"]),
            timeline=int(document["timeline"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SpoolCorruptError(
            "capture.json does not name the slot and the database system",
            hint="restore the file, or delete the spool",
        ) from error


def ensure_identity(root: Path, identity: CaptureIdentity) -> None:
    """Assign a new spool to this capture. Raises SpoolFormatError if it belongs to another one.

    The caller holds the lock, and has not opened a writer. A new timeline of the same system is recorded; the
    caller has checked that the log continues there.
    """
    found = load_identity(root)
    if found == identity:
        return
    if found is not None and replace(found, timeline=identity.timeline) != identity:
        raise SpoolFormatError(
            f"the spool at {root} was captured for another source: {_difference(found, identity)}",
            hint=f"choose another spool for this capture, or delete {root} if its changes are no longer "
            "needed",
        )
    if found is None and storage.list_directories(SpoolLayout(root).segments):
        raise SpoolFormatError(
            f"the spool at {root} has segments, but its capture.json is missing, so their source is unknown",
            hint=f"restore capture.json, or delete {root} if its changes are no longer needed",
        )
    storage.put(SpoolLayout(root).identity, json.dumps({"format": FORMAT, **asdict(identity)}).encode())


def _difference(found: CaptureIdentity, wanted: CaptureIdentity) -> str:
    names = [
        each.name
        for each in fields(CaptureIdentity)
        if getattr(found, each.name) != getattr(wanted, each.name)
    ]
    return ", ".join(f"{name} is {getattr(found, name)}, not {getattr(wanted, name)}" for name in names)


def is_spool_locked(root: Path) -> bool:
    """Whether a capture writes to the spool now."""
    return is_file_lock_held(SpoolLayout(root).lock)


class SpoolLock(FileLock):
    """The lock of the capture that writes segments."""

    def __init__(self, root: Path) -> None:
        hint = "stop the other capture, or choose another spool for this one"
        super().__init__(
            SpoolLayout(root).lock,
            lambda holder: SpoolLockedError(
                f"the spool at {root} is locked: process {holder} writes to it", hint=hint
            ),
        )


_OTHER_QUERY = 'stop the other query, or give each query another name: .option("consumer", …)'


class ConsumerLock(FileLock):
    """The lock that allows only one reader per consumer name.

    A pipeline locks the same file in its JVM, which uses POSIX record locks, so both kinds of lock are
    acquired here.
    """

    def __init__(self, root: Path, consumer: str, *, hint: str = _OTHER_QUERY) -> None:
        """`hint` tells the reader how to choose another consumer name."""

        def refusal(holder: str) -> PenstockError:
            return ConsumerBusyError(
                f"process {holder} already reads the spool at {root} as consumer {consumer}", hint=hint
            )

        self._root = root
        super().__init__(SpoolLayout(root).consumer_lock(consumer), refusal, jvm=True)

    @override
    def acquire(self) -> None:
        storage.ensure_directory(self._root)
        super().acquire()


class PollLock(FileLock):
    """Held while a polling capture takes a consistent read, so that later reads get later positions."""

    def __init__(self, root: Path) -> None:
        super().__init__(
            SpoolLayout(root).moment_lock,
            lambda holder: LockWaitError(
                f"process {holder} holds the lock for consistent reads of the source (it polls, or starts a "
                "copy)"
            ),
        )
