"""`PollingCapture`: the capture contract for Postgres, by polling tables, for servers without logical
replication or roles without the right to use it. As with `WalCapture`, a capture thread writes changes into a
spool, the live stream reads it, and acknowledgements release it. So unconfirmed changes are delivered again
unchanged, in the same order and at the same positions.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from typing_extensions import override

from penstock.capture.change_stream import LiveChanges, register
from penstock.capture.events import snapshot_events
from penstock.capture.polling.copies import CopiedTables
from penstock.capture.polling.feed import PollingFeed
from penstock.capture.polling.settings import PollingSettings
from penstock.capture.polling.tables import inspect_polled
from penstock.capture.pull import FeedCapture
from penstock.capture.settings import XMIN
from penstock.contracts.capture import UNTRACKED, Change, ChangeCapture, ChangeStream, Commit
from penstock.postgres.catalog import require_tables
from penstock.postgres.chunks import check_values, snapshot_schema
from penstock.postgres.connection import connect
from penstock.postgres.consistent_read import hold_fence, wal_position
from penstock.postgres.polled_tables import EVERYTHING, read_window
from penstock.postgres.types.rows import decode_rows
from penstock.schema import TableName


@dataclass(frozen=True, slots=True)
class PollingCapture(ChangeCapture):
    """Captures tables by querying them for changed rows.

    Polling finds less than the WAL contains. A row that changed several times between two polls is returned
    once, in its last state. Changes within a poll have no order. Deletes are found only with `rules.deletes`;
    a truncate is then returned as a truncate or as deletes. Every table needs a key. A position is the WAL
    position at the poll.

    With a cursor column, polling finds a change only if the writer increases the column, to a value that is
    not below the values that existed when the writer's transaction began. With `xmin` polling finds every
    change, and every poll reads the whole table.

    The spool may be lost at any time: polling then resumes after the last confirmed poll. With
    `rules.deletes`, the known keys are lost with the spool, so the next poll returns a truncate and then all
    rows of each table.
    """

    settings: PollingSettings

    @override
    def live(self) -> ChangeStream:
        """Stream the changes that periodic polls find. The first poll returns the changes since the last
        confirmed poll or, if nothing was polled before, since this call. `next` raises errors that occur
        later. Any thread may call `close`, which ends a waiting `next`.
        """
        settings = self.settings
        with connect(settings.address) as connection:
            require_tables(connection, settings.tables)
        feed = PollingFeed(settings)
        feed.ensure()
        register(settings.spool)
        return LiveChanges(
            settings.spool, FeedCapture(feed, settings.feed), reject_inexact=settings.types.rejects_inexact
        )

    @override
    def snapshot(self, tables: Sequence[TableName]) -> ChangeStream:
        """Read the tables in one connection and one transaction, which stays open until the stream ends: read
        it to its end, or close it.
        """
        return self._snapshot(tables)

    @override
    def lag(self) -> int | None:
        """Bytes of WAL that the server has written since the last confirmed poll; None before the first."""
        mark = self.settings.resume.load_mark()
        if mark is None:
            return None
        with connect(self.settings.address) as connection:
            return max(0, wal_position(connection) - mark.position)

    def _snapshot(self, tables: Sequence[TableName]) -> Generator[Change]:
        if not tables:
            return
        settings = replace(self.settings, rules=replace(self.settings.rules, cursor=XMIN, cursors=()))
        with connect(settings.address, "penstock snapshot") as connection:
            found = require_tables(connection, tables)
            keep = CopiedTables(self.settings, found)
            with hold_fence(connection, [table.name for table in found], keep, settings.poll_lock) as read:
                commit = Commit(read.position)
                for table in inspect_polled(connection, settings, found).checked():
                    for block in read_window(connection, table, EVERYTHING, EVERYTHING, read):
                        rows = decode_rows(block.texts, table.schema)
                        check_values(rows, table.schema, reject_inexact=settings.types.rejects_inexact)
                        batch = pa.RecordBatch.from_arrays(
                            [*rows.columns, rows.exact], schema=snapshot_schema(table.schema)
                        )
                        for event in snapshot_events(batch, table.schema):
                            yield Change(event, UNTRACKED, commit)
