"""Reference tables: kept current next to a stream, and joined with it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.reference.enrichment import LookupReference, enrich, lookup
    from penstock.reference.keeper import KeptReference, keep
    from penstock.reference.keyed_tables import ParquetKeyedTable, PostgresKeyedTable
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
    "KeptReference": "penstock.reference.keeper",
    "LookupReference": "penstock.reference.enrichment",
    "ParquetKeyedTable": "penstock.reference.keyed_tables",
    "ParquetReferenceTable": "penstock.reference.parquet",
    "PostgresKeyedTable": "penstock.reference.keyed_tables",
    "PostgresReferenceTable": "penstock.reference.postgres",
    "enrich": "penstock.reference.enrichment",
    "keep": "penstock.reference.keeper",
    "lookup": "penstock.reference.enrichment",
}


def __getattr__(name: str) -> Any:
    # Spark and the database driver are imported on first use.
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name]), name)
    raise AttributeError(name)
