"""Where a polling capture keeps what it must not forget: the mark that was confirmed last, and where each table began.

In a table of the source, or in a file. Two things, because two may write: the capture moves the mark; whoever adds a table writes down
where that one begins, before it is copied.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from penstock.capture.feeds import Mark
from penstock.errors import SpoolCorruptError
from penstock.position import Position
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.resume_table import ResumeTable
from penstock.spool import storage

_MARK = "resume.json"
_TABLES = "tables.json"


class ResumeStore(ABC):
    """Durable when a call returns."""

    @abstractmethod
    def load_mark(self) -> Mark | None:
        """None if nothing has begun yet."""

    @abstractmethod
    def save_mark(self, mark: Mark) -> None: ...

    @abstractmethod
    def load_tables(self) -> dict[int, str]:
        """By OID, in the capture's words, where tables begin that came later than the mark."""

    @abstractmethod
    def save_tables(self, tables: Mapping[int, str]) -> None:
        """Add these."""


@dataclass(frozen=True, slots=True)
class FileResume(ResumeStore):
    """In a directory of its own; it must be kept as carefully as the targets."""

    directory: Path

    @override
    def load_mark(self) -> Mark | None:
        document = self._load(_MARK)
        return None if document is None else Mark(Position.parse(document["position"]), document["state"])

    @override
    def save_mark(self, mark: Mark) -> None:
        self._store(_MARK, {"position": str(mark.position), "state": mark.state})

    @override
    def load_tables(self) -> dict[int, str]:
        return {int(oid): state for oid, state in (self._load(_TABLES) or {}).items()}

    @override
    def save_tables(self, tables: Mapping[int, str]) -> None:
        known = {**self.load_tables(), **tables}
        self._store(_TABLES, {str(oid): state for oid, state in known.items()})

    def _load(self, name: str) -> dict[str, str] | None:
        data = storage.read_bytes(self.directory / name)
        try:
            return None if data is None else dict(json.loads(data))
        except (ValueError, TypeError) as error:
            raise SpoolCorruptError(
                f"{self.directory / name} does not say where to go on", hint="restore the file, or copy the tables anew"
            ) from error

    def _store(self, name: str, document: Mapping[str, str]) -> None:
        storage.replace_bytes(self.directory / name, json.dumps(document).encode())


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
