"""Settings of a polling capture, and its resume store: the last confirmed mark and the start state of each
table, in tables of the source or in files. Mark and start states are stored separately, since two processes
may write at the same time: the capture advances the mark, and a process that adds a table stores its start
state before it copies the table. A start state is never overwritten, even if several processes add the table
at once.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import override

from penstock import storage
from penstock.capture.pull import FeedSettings, Mark
from penstock.capture.settings import CaptureLimits, CaptureMethod, CaptureSettings, Confirm, PollingRules
from penstock.errors import SlotBusyError, SpoolCorruptError
from penstock.location import absolute_path
from penstock.position import Position
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.polled_tables import ResumeTable
from penstock.postgres.types.column import TypePolicy
from penstock.schema import TableName
from penstock.spool.ownership import PollLock
from penstock.storage.locks import FileLock

_MARK = "resume.json"
_TABLES = "tables"
_LOCK = "lock"


class ResumeStore(ABC):
    """Stores the mark and the start states from which polling resumes. A write is durable when the call
    returns.
    """

    @abstractmethod
    def load_mark(self) -> Mark | None:
        """Return the last confirmed mark; None before the first poll."""

    @abstractmethod
    def begin_mark(self, mark: Mark) -> None:
        """Store the first mark unless another process has stored one."""

    @abstractmethod
    def save_mark(self, mark: Mark) -> None: ...

    @abstractmethod
    def load_tables(self) -> dict[int, str]:
        """Return the start state of each polled table, by OID."""

    @abstractmethod
    def save_tables(self, tables: Mapping[int, str]) -> None:
        """Store the start states of these tables, by OID. Tables that are stored already keep their start
        state.
        """

    @abstractmethod
    def remove_tables(self, oids: Collection[int]) -> None:
        """Stop polling these tables. A table that is added again is polled from the time of the addition."""

    @abstractmethod
    def held(self, connection: Connection) -> AbstractContextManager[object]:
        """Return a context manager that holds this store exclusively, at most until the connection ends.
        Raises `SlotBusyError` if another capture holds it.
        """


@dataclass(frozen=True, slots=True)
class FileResume(ResumeStore):
    """Stores the resume state as files in a directory, which must be kept as safely as the targets."""

    directory: Path

    @override
    def load_mark(self) -> Mark | None:
        document = self._load(_MARK)
        return None if document is None else Mark(Position.parse(document["position"]), document["state"])

    @override
    def begin_mark(self, mark: Mark) -> None:
        storage.ensure_directory(self.directory)
        storage.create(self.directory / _MARK, _marked(mark))

    @override
    def save_mark(self, mark: Mark) -> None:
        storage.put(self.directory / _MARK, _marked(mark))

    @override
    def load_tables(self) -> dict[int, str]:
        names = [name for name in storage.list_files(self.directory / _TABLES) if name.isdecimal()]
        found = {int(name): storage.read(self.directory / _TABLES / name) for name in names}
        return {oid: state.decode() for oid, state in found.items() if state is not None}

    @override
    def save_tables(self, tables: Mapping[int, str]) -> None:
        for oid, state in tables.items():
            storage.ensure_directory(self.directory / _TABLES)
            storage.create(self.directory / _TABLES / str(oid), state.encode())

    @override
    def remove_tables(self, oids: Collection[int]) -> None:
        for oid in oids:
            storage.delete(self.directory / _TABLES / str(oid))

    @override
    def held(self, connection: Connection) -> AbstractContextManager[object]:
        hint = "stop the other capture, or give this one another directory under polling.resume"
        return FileLock(
            self.directory / _LOCK,
            lambda holder: SlotBusyError(
                f"the polling position in {self.directory} is in use by process {holder}", hint=hint
            ),
        )

    def _load(self, name: str) -> dict[str, str] | None:
        data = storage.read(self.directory / name)
        try:
            return None if data is None else dict(json.loads(data))
        except (ValueError, TypeError) as error:
            raise SpoolCorruptError(
                f"{self.directory / name} cannot be parsed", hint="restore the file, or copy the tables again"
            ) from error


def _marked(mark: Mark) -> bytes:
    return json.dumps({"position": str(mark.position), "state": mark.state}).encode()


@dataclass(frozen=True, slots=True)
class SourceResume(ResumeStore):
    """Stores the resume state in the tables `penstock.polling` and `penstock.polled_tables` of the source.
    They are created when first needed.
    """

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


_POLL_LOCK_SECONDS = 60.0
"""The maximum time that a poll waits for the lock; after that it fails and is retried. A copy of tables holds
the lock while it stores their keys.
"""


@dataclass(frozen=True, slots=True)
class PollingSettings:
    """Settings of one polling capture: the source, the tables, and the spool."""

    address: SourceAddress
    name: str
    """Identifies this capture among others of the same source."""
    spool: Path
    tables: tuple[TableName, ...]
    rules: PollingRules = PollingRules.DEFAULT
    limits: CaptureLimits = field(default_factory=CaptureLimits)
    types: TypePolicy = TypePolicy.DEFAULT
    confirm: Confirm = Confirm.APPLIED

    def __post_init__(self) -> None:
        object.__setattr__(self, "spool", absolute_path(self.spool, "spool"))

    @classmethod
    def of(cls, settings: CaptureSettings) -> PollingSettings:
        """Return the settings of a capture whose method is polling."""
        rules = settings.polling
        assert rules is not None
        return cls(
            settings.address,
            settings.slot,
            settings.spool,
            settings.tables,
            rules,
            settings.limits,
            settings.types,
            settings.confirm,
        )

    @property
    def resume(self) -> ResumeStore:
        return (
            SourceResume(self.address, self.name)
            if self.rules.resume is None
            else FileResume(self.rules.resume)
        )

    @property
    def keys(self) -> Path:
        """The directory with the files of known keys and of copied row versions."""
        return self.spool / "keys"

    @contextmanager
    def poll_lock(self) -> Iterator[None]:
        """The lock under which the processes of this capture take consistent reads, one at a time."""
        lock = PollLock(self.spool)
        lock.wait(_POLL_LOCK_SECONDS)
        try:
            yield
        finally:
            lock.release()

    @property
    def feed(self) -> FeedSettings:
        return FeedSettings(
            self.name,
            CaptureMethod.POLLING,
            self.spool,
            self.limits,
            self.types,
            self.confirm,
            self.rules.interval_seconds,
        )
