"""`SourceAdapter`: the interface for source operations other than reading changes. Each capture method has an
implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from penstock.config.model import PipelineConfig
from penstock.errors import PenstockError
from penstock.pipeline.epoch_log import Epoch
from penstock.pipeline.tables import Tables
from penstock.position import Position
from penstock.postgres.catalog import inspect_whole_rows
from penstock.postgres.connection import Connection, connect
from penstock.postgres.consistent_read import inspect_system, shown_position
from penstock.postgres.membership import Membership
from penstock.postgres.server import SystemIdentity, log_wait
from penstock.postgres.slot import OnWait, current_position
from penstock.postgres.snapshot_export import Export
from penstock.schema import TableName

Describe = Callable[[TableName], str]


class SourceAdapter(ABC):
    """The source of one configuration.

    Create an adapter for each use, because the tables of the configuration may change.
    """

    check_steps: tuple[str, ...]
    """The steps of `penstock check`, in their order."""
    can_align = True
    """Whether an epoch can end at the position of a source snapshot, which `penstock verify` requires."""
    needs_tables_first = False
    """Whether a separate capture can start only when a table to capture exists."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._address = config.source.address()

    @property
    def slot(self) -> str | None:
        """The name of the replication slot; None if the method uses no slot. Once the server has invalidated
        the slot, no table is copied.
        """
        return None

    @property
    def publication(self) -> str | None:
        return None

    @property
    def change_table(self) -> str | None:
        """The schema of the change table; None if the method uses no change table."""
        return None

    @property
    def positions_are_polls(self) -> bool:
        """Whether each position stands for one poll. A poll contains everything that was committed after the
        previous poll.
        """
        return False

    def check_server(self, connection: Connection) -> None:
        """Raise an error if the server does not allow this capture method, whatever the tables are."""
        del connection

    @abstractmethod
    def begins_at(self, connection: Connection) -> Position:
        """The position after which the source still has all changes. Zero if capture has not started."""

    def is_internal(self, table: TableName) -> bool:
        """Whether the table belongs to the capture itself, and is never mirrored."""
        return self.change_table is not None and table.schema == self.change_table

    def whole_rows(self, connection: Connection, oids: Collection[int]) -> Collection[int]:
        """The OIDs of tables without a key whose updates and deletes are captured with the whole old row."""
        return inspect_whole_rows(connection, oids)

    def goal(self, connection: Connection) -> Position | None:
        """The position that `run --once` has to reach to apply everything committed so far. None if this
        position is known only after `check_origin`.
        """
        return current_position(connection)

    def seen(self, connection: Connection) -> Position | None:
        """Return a position at or after every change made before this connection last read the catalog.
        Returns None if such a position is not known now.
        """
        return shown_position(connection)

    @property
    @abstractmethod
    def export(self) -> Export:
        """The function that exports a Postgres snapshot and determines its fence."""

    def identify(self) -> SystemIdentity:
        """Return the system identifier and the timeline of the server."""
        with connect(self._address) as connection:
            return inspect_system(connection)

    @abstractmethod
    def check_origin(
        self, connection: Connection, tables: Tables, last: Epoch | None, system: SystemIdentity
    ) -> None:
        """Raise an error if the targets were filled from another server."""

    def inspect_risks(self, connection: Connection) -> list[PenstockError]:
        """Return problems that do not stop this run, but may stop a later one."""
        del connection
        return []

    @abstractmethod
    def ensure(
        self, tables: Tables, describe: Describe, *, is_alone: bool, on_wait: OnWait = log_wait
    ) -> None:
        """Provision the capture of the tables, and fail tables whose changes were missed. `is_alone`: no
        other tables are streaming.
        """

    def interrupted_tables(self, connection: Connection, tables: Iterable[TableName]) -> dict[TableName, str]:
        """Return those captured tables in `tables` whose changes may be missing, each with the reason.

        Called often while the pipeline runs, so it must be cheap.
        """
        return {}

    def unidentified_tables(
        self, connection: Connection, tables: Iterable[TableName]
    ) -> dict[TableName, PenstockError]:
        """Return those captured tables in `tables` whose changes no longer identify their rows, each with the
        error.

        Called often while the pipeline runs, so it must be cheap.
        """
        return {}

    @abstractmethod
    def provision_resync(self, tables: Sequence[TableName]) -> Mapping[TableName, Membership]:
        """Provision the capture of tables before their resync. Returns the membership of each table, or
        nothing if the method does not record memberships.
        """

    @abstractmethod
    def deprovision(self, tables: Collection[TableName]) -> None:
        """Stop the capture of tables that the pipeline no longer needs."""
