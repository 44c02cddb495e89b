"""Whether the tables of a capture have been in the publication all the while.

The spool holds, for each consumer, which act put each table in, and which table that was. A spool that is lost takes this knowledge along,
and nothing else.

What is compared is the catalog of two moments. So a table that joined, left and joined again between two looks was never seen, and a
publication that left operations out for a while (`publish`) looks as before.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from urllib.parse import quote

from penstock.capture.settings import CaptureSettings
from penstock.errors import LockWaitError, PublicationError, SpoolCorruptError, SpoolError, TableGapError
from penstock.postgres.connection import Connection
from penstock.postgres.membership import Member, MemberCatalog, inspect_members
from penstock.postgres.publication import inspect_publication
from penstock.postgres.queries import identifier
from penstock.postgres.slot import COPY_ANEW, drop_statement
from penstock.schema import TableName
from penstock.spool import storage
from penstock.spool.manifest import parse_document

_log = logging.getLogger(__name__)

_FORMAT = 1
_NAMED = 5
"""How many tables an error names."""


def check_publication(connection: Connection, settings: CaptureSettings, *, has_slot: bool = True) -> None:
    """Raise if there is none. From version 18 on the server would send nothing, and tell nobody."""
    name = settings.publication
    if inspect_publication(connection, name) is not None:
        return
    make = f"CREATE PUBLICATION {identifier(name)} FOR TABLE …;"
    if not has_slot:
        raise PublicationError(
            f"publication {name} does not exist, and a slot that is older than its publication cannot be read",
            hint=f"{make} or let the capture make it, by with_publication_management",
        )
    raise PublicationError(
        f"publication {name} does not exist: what changes meanwhile cannot be had through slot {settings.slot}, now or later",
        hint=f"{drop_statement(settings.slot)} {make} then {COPY_ANEW}",
    )


class MemberWatch:
    """The tables of one consumer. For one thread at a time."""

    def __init__(
        self, settings: CaptureSettings, consumer: str, required: Collection[TableName], takes: Collection[TableName] | None
    ) -> None:
        """The consumer takes these by name; or with None whatever the publication gives, of which the `required` must not leave."""
        self._settings = settings
        self._consumer = consumer
        self._required = frozenset(required)
        self._takes = takes
        self._told: set[TableName] = set()
        self._lock = threading.Lock()

    def check(self, *, anew: bool = False) -> None:
        """Raise if changes may be missing of a table that was seen before; write down what is seen for the first time.

        With `anew` nothing counts as seen before: nobody has read anything yet.
        """
        with self._lock:  # a former look may not have come to its end
            self._check(anew=anew)

    def _check(self, *, anew: bool) -> None:
        settings = self._settings
        recorded = {} if anew else load_members(settings.spool, self._consumer)
        found = self._inspect()
        if self._holes(found, recorded):
            found = self._inspect()  # which is several questions: a table that was altered between them may look like one that left
        named = self._holes(found, recorded)
        if named:
            more = f" (and {len(named) - _NAMED} more)" if len(named) > _NAMED else ""
            raise TableGapError(
                f"{'; '.join(named[:_NAMED])}{more}: changes may be missing", hint=f"{drop_statement(settings.slot)} then {COPY_ANEW}"
            )
        for name, member in recorded.items():
            if member.oid in found.names and found.names[member.oid] not in found.members:
                self._tell(name)
        known = self._known(found, recorded)
        if known != recorded or anew:
            try:
                save_members(settings.spool, self._consumer, known)
            except OSError as error:
                raise SpoolError(f"the spool cannot be written: {error}") from error

    def look(self) -> None:
        """The same for a stream that runs or goes on: somebody who has a table to himself, perhaps for hours, does not stop it."""
        try:
            self.check()
        except LockWaitError as error:
            _log.info("tables not looked at", extra={"code": error.code})

    def _inspect(self) -> MemberCatalog:
        settings = self._settings
        takes = self._takes
        return inspect_members(
            settings.address, settings.publication, lambda table: takes is None or table in takes, old_rows=settings.old_rows
        )

    def _holes(self, found: MemberCatalog, recorded: Mapping[TableName, Member]) -> list[str]:
        reasons = {name: self._hole(found, name, member, recorded) for name, member in recorded.items()}
        return [f"table {name} {reason}" for name, reason in reasons.items() if reason is not None]

    def _hole(self, found: MemberCatalog, name: TableName, before: Member, recorded: Mapping[TableName, Member]) -> str | None:
        if self._takes is not None:
            return found.gap(name, before, must_be_published=True)
        if before.oid not in found.names and found.members.get(name) in recorded.values():
            return None  # another one that was seen all the while has the name of one that was dropped
        return found.hole(name, before, must_be_published=name in self._required)

    def _known(self, found: MemberCatalog, recorded: Mapping[TableName, Member]) -> dict[TableName, Member]:
        """What was seen before, under the name that it has now; what is no more, unless another has its name; and what is new."""
        if self._takes is not None:
            return {**found.members, **recorded}
        kept = {found.names.get(member.oid, name): member for name, member in recorded.items() if member.oid in found.names}
        gone = {name: member for name, member in recorded.items() if member.oid not in found.names}
        return {**gone, **found.members, **kept}

    def _tell(self, name: TableName) -> None:
        if name not in self._told:
            self._told.add(name)
            _log.warning("table is no longer in the publication", extra={"table": str(name), "publication": self._settings.publication})


def load_members(root: Path, consumer: str) -> dict[TableName, Member]:
    """What was written down; empty before the first look."""
    path = _path(root, consumer)
    try:
        data = storage.read_bytes(path)
    except OSError as error:
        raise SpoolError(f"the spool cannot be read: {error}") from error
    if data is None:
        return {}
    document = parse_document(data, where=f"tables/{path.name}")
    try:
        return {TableName.parse(name): Member(int(oid), str(act)) for name, (oid, act) in document["tables"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpoolCorruptError(
            f"tables/{path.name} cannot be understood", hint="remove the file if the publication has not been changed since the last run"
        ) from error


def save_members(root: Path, consumer: str, members: Mapping[TableName, Member]) -> None:
    tables = {str(name): [member.oid, member.act] for name, member in sorted(members.items())}
    storage.replace_bytes(_path(root, consumer), json.dumps({"format": _FORMAT, "consumer": consumer, "tables": tables}).encode())


def _path(root: Path, consumer: str) -> Path:
    return root / "tables" / f"{quote(consumer, safe='')}.json"
