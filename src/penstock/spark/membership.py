"""Whether the tables of a query have been in the publication all the while, and are still the tables that they were.

The spool holds, for each consumer, which act put each table in, and which table that was. A spool that is lost takes this knowledge along,
and nothing else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from penstock.errors import LockWaitError, SpoolCorruptError, TableGapError
from penstock.postgres.membership import Member, inspect_members
from penstock.schema import TableName
from penstock.spark.offsets import ANEW
from penstock.spark.request import SourceRequest
from penstock.spool import storage
from penstock.spool.manifest import parse_document

LOOK_SECONDS = 30.0
"""How often a query that runs looks again. Whatever it has not seen, the next run finds."""

_FORMAT = 1


class TableWatch:
    """The tables of one query. Used by one thread, that of Spark's calls."""

    def __init__(self, request: SourceRequest, look_seconds: float = LOOK_SECONDS) -> None:
        self._request = request
        self._settings = request.capture()
        self._look_seconds = look_seconds
        self._due = 0.0

    def begin(self, *, anew: bool) -> None:
        """Write down what is there; with `anew`, whatever an earlier query saw. Call it after the publication, and before the fence."""
        self._due = 0.0
        if anew:
            _store(self._settings.spool, self._request.consumer, {})
        self.check()

    def check(self) -> None:
        """Raise if changes may be missing. Looks at the first call, and then now and then."""
        if time.monotonic() < self._due:
            return
        is_first, self._due = self._due == 0.0, time.monotonic() + self._look_seconds
        try:
            found = inspect_members(self._settings.address, self._settings.publication, self._request.choice.selects)
        except LockWaitError:  # somebody has a table to himself, perhaps for hours: the stream goes on meanwhile
            if is_first:
                raise
            return
        recorded = load_members(self._settings.spool, self._request.consumer)
        for name, member in recorded.items():
            reason = found.gap(name, member, must_be_published=bool(self._request.choice.patterns))
            if reason is not None:
                raise TableGapError(
                    f"table {name} {reason}, so changes of it may be missing", hint=f"{ANEW}, and with startingPosition snapshot"
                )
        known = {**found.members, **recorded}
        if known != recorded or not recorded:
            _store(self._settings.spool, self._request.consumer, known)


def load_members(root: Path, consumer: str) -> dict[TableName, Member]:
    """What was written down; empty before the first look."""
    path = _path(root, consumer)
    data = storage.read_bytes(path)
    if data is None:
        return {}
    document = parse_document(data, where=f"tables/{path.name}")
    try:
        return {TableName.parse(name): Member(int(oid), str(act)) for name, (oid, act) in document["tables"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpoolCorruptError(
            f"tables/{path.name} cannot be understood", hint="remove the file if the publication has not been changed since the last run"
        ) from error


def _store(root: Path, consumer: str, members: Mapping[TableName, Member]) -> None:
    tables = {str(name): [member.oid, member.act] for name, member in sorted(members.items())}
    storage.replace_bytes(_path(root, consumer), json.dumps({"format": _FORMAT, "consumer": consumer, "tables": tables}).encode())


def _path(root: Path, consumer: str) -> Path:
    return root / "tables" / f"{quote(consumer, safe='')}.json"
