"""Whether the tables of a query have been in the publication all the while, and are still the tables that they were.

The server decides by its catalog, as of each change, what is published. A table that was taken out and put in again looks as before, and so
does another one that was given its name; changes in between are in no log. So the spool holds, for each consumer, which act put each table
in, and which table that was. A spool that is lost takes this knowledge along, and nothing else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from penstock.errors import LockWaitError, SpoolCorruptError, TableGapError
from penstock.postgres.catalog import inspect_tables
from penstock.postgres.connection import connect
from penstock.postgres.outline import lock_patience
from penstock.postgres.publication import inspect_memberships
from penstock.schema import TableName
from penstock.spark.offsets import ANEW
from penstock.spark.request import SourceRequest
from penstock.spool import storage
from penstock.spool.manifest import parse_document

LOOK_SECONDS = 30.0
"""How often a query that runs looks again. Whatever it has not seen, the next run finds."""

_FORMAT = 1
_LOCK_SECONDS = 1


@dataclass(frozen=True, slots=True)
class Member:
    """A table in the publication. `act` stays the same for as long as it has been there without a break."""

    oid: int
    act: str


@dataclass(frozen=True, slots=True)
class Catalog:
    """What there is now: every table by its OID, and those of the query that are published."""

    names: Mapping[int, TableName]
    members: Mapping[TableName, Member]


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
            found = self._inspect()
        except LockWaitError:  # somebody has a table to himself, perhaps for hours: the stream goes on meanwhile
            if is_first:
                raise
            return
        recorded = load_members(self._settings.spool, self._request.consumer)
        for name, member in recorded.items():
            reason = _gap(name, member, found, must_be_published=bool(self._request.choice.patterns))
            if reason is not None:
                raise TableGapError(
                    f"table {name} {reason}, so changes of it may be missing", hint=f"{ANEW}, and with startingPosition snapshot"
                )
        known = {**found.members, **recorded}
        if known != recorded or not recorded:
            _store(self._settings.spool, self._request.consumer, known)

    def _inspect(self) -> Catalog:
        with connect(self._settings.address) as connection:
            connection.execute(lock_patience(_LOCK_SECONDS))
            tables = inspect_tables(connection)
            chosen = {table.name: table.oid for table in tables if self._request.choice.selects(table.name)}
            acts = inspect_memberships(connection, self._settings.publication, chosen)
        return Catalog({table.oid: table.name for table in tables}, {name: Member(chosen[name], act) for name, act in acts.items()})


def _gap(name: TableName, member: Member, found: Catalog, *, must_be_published: bool) -> str | None:
    """What happened to a table, in words; None if nothing that matters did. One that was dropped leaves nothing to be equal to."""
    now, called = found.members.get(name), found.names.get(member.oid)
    if now == member:
        return None
    if called is not None and called != name:
        return f"is called {called} by now"
    if called is None:
        return "was dropped, and another one has its name" if name in found.names.values() else None
    if now is not None:
        return "was taken out of the publication and put in again"
    return "was taken out of the publication" if must_be_published else None


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
