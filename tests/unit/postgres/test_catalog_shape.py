from __future__ import annotations

from penstock.postgres.catalog import CatalogShape
from penstock.schema import TableName, TableSchema


def test_transaction_ids_are_understood_after_wraparound() -> None:
    """The log has 32 bits of them, the catalog 64."""
    schema = TableSchema(1, TableName("public", "t"), (), ())
    found = CatalogShape(schema, {}, (5 << 32) + 10, frozenset({(4 << 32) + 4_000_000_000, (5 << 32) + 3}))
    assert [found.shows(xid) for xid in (2, 3, 9, 10, 11)] == [True, False, True, False, False]
    assert [found.shows(xid) for xid in (4_000_000_001, 4_000_000_000)] == [True, False]
