"""`PollingCapture`: the contract of a capture, for Postgres, by asking its tables again and again.

For servers without logical replication, or roles without a right to it. A view of the one engine: a `FeedCapture` writes each look into a
spool, the live stream reads it, and acknowledgements release it, as with `WalCapture`. So what was not confirmed comes again just as it
was, in the same order and at the same positions.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from typing_extensions import override

from penstock.capture.events import snapshot_events
from penstock.capture.feeding import FeedCapture
from penstock.capture.live import LiveChanges, register
from penstock.capture.polling_copies import CopiedTables
from penstock.capture.polling_feed import PollingFeed
from penstock.capture.polling_rules import XMIN
from penstock.capture.polling_settings import PollingSettings
from penstock.capture.polling_tables import find_tables, inspect_polled
from penstock.contracts.capture import UNTRACKED, Change, ChangeCapture, ChangeStream, Commit
from penstock.errors import NoTablesError
from penstock.postgres.chunks import check_values, snapshot_schema
from penstock.postgres.connection import connect
from penstock.postgres.moments import hold_fence, reached_position
from penstock.postgres.polled import EVERYTHING, read_window
from penstock.postgres.types.rows import decode_rows
from penstock.schema import TableName


@dataclass(frozen=True, slots=True)
class PollingCapture(ChangeCapture):
    """Captures some tables by asking for rows that have changed.

    What it can tell is less than a log can: of a row that changed several times between two looks only the last state, changes within a
    look in no order, a truncate as a truncate or as deletes, and deletes only with `rules.deletes`. Every table needs a key. A position is
    where the server's log was at the look.

    With a cursor column, a row is found only if whoever changes it raises the column, to a value not below those that were there when
    its transaction began. With `xmin` every change is found, and every look reads the whole table.

    The spool may be lost at any time: the look after the last confirmed one is then made again. With `rules.deletes` the tables' rows come
    anew behind a truncate.
    """

    settings: PollingSettings

    @override
    def live(self) -> ChangeStream:
        """Begin, if nothing has begun yet, then look again and again. `next` raises what stops it later.

        Its `close` may be called from any thread and ends a `next` that waits.
        """
        settings = self.settings
        self._check_tables(settings.tables)
        feed = PollingFeed(settings)
        feed.ensure()
        register(settings.spool)
        return LiveChanges(settings.spool, FeedCapture(feed, settings.feed), refuse_inexact=settings.types.refuses_inexact)

    @override
    def snapshot(self, tables: Sequence[TableName]) -> ChangeStream:
        """In one connection and one transaction, which stays open until the stream ends: read it through, or close it."""
        return self._snapshot(tables)

    @override
    def lag(self) -> int | None:
        """Bytes that the server has written to its log since the last confirmed look; None until there is one."""
        mark = self.settings.resume.load_mark()
        if mark is None:
            return None
        with connect(self.settings.address) as connection:
            return max(0, reached_position(connection) - mark.position)

    def _snapshot(self, tables: Sequence[TableName]) -> Generator[Change]:
        if not tables:
            return
        self._check_tables(tables)
        settings = replace(self.settings, rules=replace(self.settings.rules, cursor=XMIN, cursors=()))
        with connect(settings.address, "penstock snapshot") as connection:
            found = find_tables(connection, tables)
            keep = CopiedTables(self.settings, found)
            with hold_fence(connection, [table.name for table in found], keep, settings.turn) as moment:
                commit = Commit(moment.position)
                for table in inspect_polled(connection, settings, found).checked():
                    for block in read_window(connection, table, EVERYTHING, EVERYTHING, moment):
                        rows = decode_rows(block.texts, table.schema)
                        check_values(rows, table.schema, refuse_inexact=settings.types.refuses_inexact)
                        batch = pa.RecordBatch.from_arrays([*rows.columns, rows.exact], schema=snapshot_schema(table.schema))
                        for event in snapshot_events(batch, table.schema):
                            yield Change(event, UNTRACKED, commit)

    def _check_tables(self, tables: Sequence[TableName]) -> None:
        with connect(self.settings.address) as connection:
            found = {table.name for table in find_tables(connection, tables)}
        unknown = [table for table in tables if table not in found]
        if unknown:
            raise NoTablesError(
                f"there is no table in the source that can be captured by the name {', '.join(map(str, unknown))}",
                hint="check the name; case counts, and a partition is part of its root",
            )
