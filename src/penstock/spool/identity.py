"""Whose changes a spool holds. A spool belongs to one slot of one database system for life; positions of another mean nothing in it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from penstock.errors import SpoolCorruptError, SpoolFormatError
from penstock.spool import storage
from penstock.spool.layout import FORMAT, SpoolLayout
from penstock.spool.manifest import parse_document


@dataclass(frozen=True, slots=True)
class CaptureIdentity:
    slot: str
    publication: str
    system_identifier: str
    timeline: int


def load_identity(root: Path) -> CaptureIdentity | None:
    """Whose the spool is; None if nobody has captured into it."""
    data = storage.read_bytes(SpoolLayout(root).identity)
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
        raise SpoolCorruptError("capture.json does not say who captures", hint="restore the file, or delete the spool") from error


def ensure_identity(root: Path, identity: CaptureIdentity) -> None:
    """Make the spool this capture's if it is nobody's; refuse if it is another's. Call it with the lock held, before the writer.

    A new timeline of the same system is written down: whether the log goes on there is for the caller to find out, before.
    """
    found = load_identity(root)
    if found == identity:
        return
    if found is not None and replace(found, timeline=identity.timeline) != identity:
        raise SpoolFormatError(
            f"the spool at {root} was captured for another source: {_difference(found, identity)}",
            hint="give this capture a spool of its own, or delete that directory if its changes are no longer needed",
        )
    if found is None and storage.list_directories(SpoolLayout(root).segments):
        raise SpoolFormatError(
            f"the spool at {root} has segments, but its capture.json is missing, so nothing tells whose they are",
            hint="restore capture.json, or delete that directory if its changes are no longer needed",
        )
    storage.replace_bytes(SpoolLayout(root).identity, json.dumps({"format": FORMAT, **asdict(identity)}).encode())


def _difference(found: CaptureIdentity, wanted: CaptureIdentity) -> str:
    names = [each.name for each in fields(CaptureIdentity) if getattr(found, each.name) != getattr(wanted, each.name)]
    return ", ".join(f"{name} is {getattr(found, name)}, not {getattr(wanted, name)}" for name in names)
