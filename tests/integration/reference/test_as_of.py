"""The join as of a change's commit, without Spark: spool, reference table and join, compared with SQL."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from penstock.capture.provision import ensure_capture
from penstock.capture.settings import CaptureLimits, CaptureSettings
from penstock.errors import ReferencePastError
from penstock.position import Position
from penstock.postgres.connection import SourceAddress
from penstock.reference.join import Enrichment, KeptFinder
from penstock.reference.keeper import KeptReference, keep
from penstock.reference.postgres import PostgresReferenceTable
from penstock.reference.store import load_state
from penstock.schema import TableName
from penstock.spool.reader import SpoolReader
from penstock.spool.retention import release, set_released
from penstock.spool.rows import read_rows
from tests.support.fix_postgres import Database
from tests.support.reference.commerce import Commerce, check_against_sql
from tests.support.waiting import wait_for

CUSTOMERS, ORDERS = TableName("public", "customers"), TableName("public", "orders")
CONSUMER = "orders"


class OrdersStream:
    """The changes of the orders, from the spool that the capture of the reference table fills, in the form
    that a Spark query reads.
    """

    def __init__(self, database: Database, root: Path) -> None:
        self.settings = CaptureSettings(
            SourceAddress.parse(database.dsn),
            slot=database.name,
            publication=database.name,
            spool=root / "spool",
            limits=CaptureLimits(quiet_seconds=0.2),
        )
        ensure_capture(self.settings.address, self.settings.slot, self.settings.publication, [ORDERS])
        # A reader that exists and needs everything.
        set_released(self.settings.spool, CONSUMER, Position.ZERO)
        self._spool = SpoolReader(self.settings.spool)

    def customers(self) -> PostgresReferenceTable:
        return PostgresReferenceTable(self.settings, CUSTOMERS)

    def joined(
        self, kept: KeptReference, after: Position, tx: int
    ) -> tuple[list[dict[str, object]], Position]:
        """All joined orders after a position, up to and including a given transaction, and the
        end position.
        """
        rows: list[dict[str, object]] = []

        def there() -> bool:
            end = self._spool.end
            if end is None:
                return False
            start = max(after, self._spool.start or after)
            rows[:] = self._read(kept, start, end)
            self._end = end
            return any(row["tx"] == tx for row in rows)

        wait_for(there, f"transaction {tx}", lambda: len(rows))
        return rows, self._end

    def _read(self, kept: KeptReference, start: Position, end: Position) -> list[dict[str, object]]:
        found = self._spool.read(start, end).tables.get(ORDERS)
        join = enrichment(kept).join
        batches = [
            batch for each in (found.slices if found else ()) for batch in read_rows(each, 50, 1 << 20)
        ]
        return [row for batch in batches for row in join(batch).to_pylist()]

    def release(self, position: Position) -> None:
        release(self.settings.spool, CONSUMER, position)


def enrichment(kept: KeptReference) -> Enrichment:
    shown = (("name", "customer_name"), ("about", "customer_about"))
    types = dict.fromkeys(("customer_name", "customer_about"), pa.string())
    return Enrichment(
        KeptFinder(kept.directory, kept.identity, 60.0),
        (("customer", "id"),),
        shown,
        types,
        "found",
        "_commit_version",
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_every_change_is_joined_with_the_customers_at_its_commit(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    # Compacted constantly, so that a compaction at a wrong version is detected.
    monkeypatch.setattr("penstock.reference.keeper._MOST_FILES", 3)
    monkeypatch.setattr("penstock.reference.keeper._FEWEST_FOLDED_ROWS", 10)
    commerce, stream = Commerce(database, seed), OrdersStream(database, tmp_path)
    at, since = Position.ZERO, 0
    checked = 0
    for _ in range(3):  # each time another reference table, which resumes
        with keep(stream.customers(), tmp_path / "customers", as_of_commit=True) as kept:
            for _ in range(2):
                commerce.trade(people=3, transactions=12)
                commerce.clear_out()
                rows, end = stream.joined(kept, at, commerce.order[-1])
                again, _ = stream.joined(kept, at, commerce.order[-1])
                assert again[: len(rows)] == rows, "a batch that is repeated is the same"
                checked += check_against_sql(commerce, rows, since)
                at, since = end, commerce.order[-1]
                stream.release(end)
        commerce.trade(people=2, transactions=5)  # while the reference table is not running
    assert checked > 200
    state = load_state(tmp_path / "customers")
    assert state is not None
    assert state.floor > 0


def test_change_from_before_the_table_was_kept_is_an_error_and_not_a_guess(
    database: Database, tmp_path: Path
) -> None:
    commerce, stream = Commerce(database), OrdersStream(database, tmp_path)
    commerce.trade(people=1, transactions=2)
    with (
        keep(stream.customers(), tmp_path / "customers", as_of_commit=True) as kept,
        pytest.raises(ReferencePastError),
    ):
        stream.joined(kept, Position.ZERO, commerce.order[-1])
