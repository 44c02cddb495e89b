"""Reference tables: kept current beside a stream, and joined with it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.reference.enrichment import LookupReference, enrich, lookup
    from penstock.reference.keeping import KeptReference, keep
    from penstock.reference.keyed import ParquetKeyedTable, PostgresKeyedTable
    from penstock.reference.parquet import ParquetReferenceTable
    from penstock.reference.postgres import PostgresReferenceTable

__all__ = [
    "KeptReference",
    "LookupReference",
    "ParquetKeyedTable",
    "ParquetReferenceTable",
    "PostgresKeyedTable",
    "PostgresReferenceTable",
    "enrich",
    "keep",
    "lookup",
]

_ELSEWHERE = {
    "KeptReference": "penstock.reference.keeping",
    "LookupReference": "penstock.reference.enrichment",
    "ParquetKeyedTable": "penstock.reference.keyed",
    "ParquetReferenceTable": "penstock.reference.parquet",
    "PostgresKeyedTable": "penstock.reference.keyed",
    "PostgresReferenceTable": "penstock.reference.postgres",
    "enrich": "penstock.reference.enrichment",
    "keep": "penstock.reference.keeping",
    "lookup": "penstock.reference.enrichment",
}


def __getattr__(name: str) -> Any:
    # Spark and the database driver are imported only by those who use them.
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    raise AttributeError(name)
