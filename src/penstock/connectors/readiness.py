"""What must be in place before a connector reads: publication, then slot, and tables that are still the ones that they were."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from penstock.capture.provision import check_coverage, ensure_capture, ensure_coverage
from penstock.capture.settings import CaptureSettings
from penstock.errors import TableGapError
from penstock.postgres.connection import connect
from penstock.postgres.membership import Member, inspect_members
from penstock.postgres.slot import OnWait, check_server, ensure_slot, inspect_server
from penstock.schema import TableName
from penstock.spool.identity import load_identity


def ensure_source(settings: CaptureSettings, on_wait: OnWait, *, is_known: bool) -> None:
    """Make what is missing, or raise what is in the way, with the statements that mend it.

    A slot is made only where none can have been before: neither for a consumer that `is_known`, nor for a spool that was filled from one.
    Making it waits for the transactions that are open at that moment; `on_wait` is told once a second for which.
    """
    address, tables = settings.address, settings.tables
    if is_known or load_identity(settings.spool) is not None:
        if tables:
            check_coverage(ensure_coverage(address, settings.publication, tables, manage=True))
    elif tables:
        ensure_capture(address, settings.slot, settings.publication, tables, failover=settings.failover, on_wait=on_wait)
    else:
        with connect(address) as connection:
            check_server(inspect_server(connection))
            ensure_slot(address, connection, settings.slot, failover=settings.failover, on_wait=on_wait)


def check_members(
    settings: CaptureSettings, tables: Collection[TableName], before: Mapping[TableName, Member]
) -> Mapping[TableName, Member]:
    """`tables` as they are in the publication now. Raises if changes may be missing of one that was a member `before`."""
    found = inspect_members(settings.address, settings.publication, lambda table: table in tables)
    for table, member in before.items():
        what = found.gap(table, member, must_be_published=bool(settings.tables))
        if what is not None:
            raise TableGapError(
                f"table {table} {what}, so changes of it may be missing", hint="start without a checkpoint, which copies the tables anew"
            )
    return found.members
