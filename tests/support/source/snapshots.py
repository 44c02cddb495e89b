"""Fill a table of the source, and read its current rows."""

from __future__ import annotations

from penstock.spark.options import SNAPSHOT
from tests.support.source.stream import ChangeSource

BLOCK = {"startingPosition": SNAPSHOT, "chunkBytes": "8192", "maxBytesPerBatch": "8192"}


def current(source: ChangeSource) -> dict[int, str | None]:
    return dict(source.database.query("SELECT id, note FROM orders"))


def fill(source: ChangeSource, rows: int) -> None:
    """Some blocks of heap, 200 rows in each."""
    source.database.execute("ALTER TABLE orders SET (autovacuum_enabled = false)")
    source.insert(1, rows)
