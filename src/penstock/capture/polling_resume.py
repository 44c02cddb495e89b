"""Where a polling capture keeps what it must not forget: the mark that was confirmed last, and where each table began.

In a table of the source, or in a file. Two things, because two may write: the capture moves the mark; whoever adds a table writes down
where that one begins, before it is copied. What has begun, begins nowhere else, however many begin it at once.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from penstock.capture.feeds import Mark
from penstock.errors import SlotBusyError, SpoolCorruptError
from penstock.position import Position
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.resume_table import ResumeTable
from penstock.spool import storage
from penstock.spool.lock import FileLock

_MARK = "resume.json"
_TABLES = "tables"
_LOCK = "lock"


class ResumeStore(ABC):
    """Durable when a call returns."""

    @abstractmethod
    def load_mark(self) -> Mark | None:
        """None if nothing has begun yet."""

    @abstractmethod
    def begin_mark(self, mark: Mark) -> None:
        """Unless there is one, which others may have made by now."""

    @abstractmethod
    def save_mark(self, mark: Mark) -> None: ...

    @abstractmethod
    def load_tables(self) -> dict[int, str]:
        """By OID, in the capture's words, where tables begin: all that are asked."""

    @abstractmethod
    def save_tables(self, tables: Mapping[int, str]) -> None:
        """Add these; those that are there begin where they began."""

    @abstractmethod
    def remove_tables(self, oids: Collection[int]) -> None:
        """These are not asked any more. One that is added again begins then."""

    @abstractmethod
    def held(self, connection: Connection) -> AbstractContextManager[object]:
        """Be the only capture that uses this, for the length of a block and of the connection. `SlotBusyError` if there is another."""


@dataclass(frozen=True, slots=True)
class FileResume(ResumeStore):
    """In a directory of its own; it must be kept as carefully as the targets."""

    directory: Path

    @override
    def load_mark(self) -> Mark | None:
        document = self._load(_MARK)
        return None if document is None else Mark(Position.parse(document["position"]), document["state"])

    @override
    def begin_mark(self, mark: Mark) -> None:
        storage.create_bytes(self.directory / _MARK, _marked(mark))

    @override
    def save_mark(self, mark: Mark) -> None:
        storage.replace_bytes(self.directory / _MARK, _marked(mark))

    @override
    def load_tables(self) -> dict[int, str]:
        names = [name for name in storage.list_files(self.directory / _TABLES) if name.isdecimal()]
        found = {int(name): storage.read_bytes(self.directory / _TABLES / name) for name in names}
        return {oid: state.decode() for oid, state in found.items() if state is not None}

    @override
    def save_tables(self, tables: Mapping[int, str]) -> None:
        for oid, state in tables.items():
            storage.create_bytes(self.directory / _TABLES / str(oid), state.encode())

    @override
    def remove_tables(self, oids: Collection[int]) -> None:
        for oid in oids:
            storage.remove_file(self.directory / _TABLES / str(oid))

    @override
    def held(self, connection: Connection) -> AbstractContextManager[object]:
        hint = "stop the other capture, or give this one a directory of its own under polling.resume"
        return FileLock(
            self.directory / _LOCK, lambda holder: SlotBusyError(f"process {holder} polls by {self.directory / _MARK}", hint=hint)
        )

    def _load(self, name: str) -> dict[str, str] | None:
        data = storage.read_bytes(self.directory / name)
        try:
            return None if data is None else dict(json.loads(data))
        except (ValueError, TypeError) as error:
            raise SpoolCorruptError(
                f"{self.directory / name} does not say where to go on", hint="restore the file, or copy the tables anew"
            ) from error


def _marked(mark: Mark) -> bytes:
    return json.dumps({"position": str(mark.position), "state": mark.state}).encode()


@dataclass(frozen=True, slots=True)
class SourceResume(ResumeStore):
    """In `penstock.polling` and `penstock.polled_tables` of the source, which are made when they are first needed."""

    address: SourceAddress
    name: str

    @override
    def load_mark(self) -> Mark | None:
        with connect(self.address) as connection:
            found = ResumeTable(connection, self.name).load_mark()
        return None if found is None else Mark(*found)

    @override
    def begin_mark(self, mark: Mark) -> None:
        with connect(self.address) as connection:
            ResumeTable(connection, self.name).begin_mark(mark.position, mark.state)

    @override
    def save_mark(self, mark: Mark) -> None:
        with connect(self.address) as connection:
            ResumeTable(connection, self.name).save_mark(mark.position, mark.state)

    @override
    def load_tables(self) -> dict[int, str]:
        with connect(self.address) as connection:
            return ResumeTable(connection, self.name).load_tables()

    @override
    def save_tables(self, tables: Mapping[int, str]) -> None:
        with connect(self.address) as connection:
            ResumeTable(connection, self.name).save_tables(tables)

    @override
    def remove_tables(self, oids: Collection[int]) -> None:
        with connect(self.address) as connection:
            ResumeTable(connection, self.name).remove_tables(oids)

    @override
    def held(self, connection: Connection) -> AbstractContextManager[object]:
        return ResumeTable(connection, self.name).held()
