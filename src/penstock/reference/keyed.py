"""Tables that are asked for rows by key, from executors: one of Postgres, and Parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from typing_extensions import override

from penstock.capture.settings import CaptureSettings
from penstock.contracts.reference import KeyedReferenceTable
from penstock.errors import ReferenceUnreadableError, SchemaChangedError, UnsupportedTableError
from penstock.location import absolute_path
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.chunks import snapshot_schema
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.keyed import KeyBatch, can_be_asked, read_keys
from penstock.postgres.outline import TableOutline, inspect_outline
from penstock.reference.history import row_schema
from penstock.reference.membership import inspect_shape
from penstock.reference.parquet import parquet_columns
from penstock.schema import TableName

_KEYS_A_QUERY = 10_000


@dataclass(frozen=True, slots=True)
class PostgresKeyedTable(KeyedReferenceTable):
    """A table of Postgres, of which rows are read through the index of its key. Make it with `inspect`, in the driver."""

    address: SourceAddress
    outline: TableOutline
    refuse_inexact: bool = False

    @classmethod
    def inspect(cls, settings: CaptureSettings, table: TableName) -> PostgresKeyedTable:
        """Look at the table now. Needs neither slot nor publication: of `settings`, address and types count."""
        schema = inspect_shape(settings.address, table, settings.types, None)
        odd = [column.name for column in schema.columns if column.name in schema.key and not can_be_asked(column.arrow_type)]
        if odd:
            raise UnsupportedTableError(
                f"rows of {table} cannot be asked for by {odd[0]!r}, which has a nested type", hint="keep the table"
            )
        with connect(settings.address) as connection:
            outline = inspect_outline(connection, CatalogTable(schema.oid, table), settings.types).outline
        # A lookup is one statement and sees one moment, so a table that is rewritten between two of them is as good as before.
        return cls(settings.address, replace(outline, leaves=()), settings.types.refuses_inexact)

    @override
    def schema(self) -> pa.Schema:
        return pa.schema([pa.field(column.name, column.arrow_type) for column in self.outline.schema.columns])

    @override
    def key(self) -> tuple[str, ...]:
        return self.outline.schema.key

    @override
    def lookup(self, keys: pa.RecordBatch) -> pa.Table:
        texts = [key_texts(keys.column(name)) for name in self.key()]
        nothing = pa.nulls(keys.num_rows, pa.string())
        batches = [
            KeyBatch(tuple(text.slice(at, _KEYS_A_QUERY) for text in texts), (nothing.slice(at, _KEYS_A_QUERY),) * len(texts))
            for at in range(0, keys.num_rows, _KEYS_A_QUERY)
        ]
        rows = list(read_keys(self.address, None, self.outline, batches, refuse_inexact=self.refuse_inexact))
        return pa.Table.from_batches(rows, snapshot_schema(self.outline.schema))


def key_texts(column: pa.Array) -> pa.StringArray:
    """Values as Postgres reads them."""
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return pa.array([None if value is None else rf"\x{value.hex()}" for value in column.to_pylist()], pa.string())
    if pa.types.is_floating(column.type):
        return pa.array([None if value is None else repr(value) for value in column.to_pylist()], pa.string())
    return column.cast(pa.string())


@dataclass(frozen=True, slots=True)
class ParquetKeyedTable(KeyedReferenceTable):
    """Parquet files, of which only the row groups are read that may hold a key. They may be replaced at any time, by others of the same
    columns. Make it with `inspect`, in the driver.
    """

    path: Path
    columns: pa.Schema
    key_columns: tuple[str, ...]

    @classmethod
    def inspect(cls, path: str | Path, key: Sequence[str]) -> ParquetKeyedTable:
        """Look at the files now. The key names the columns that tell rows apart."""
        found = absolute_path(path, "path")
        columns = parquet_columns(_dataset(found).schema, key)
        return cls(found, columns, tuple(name for name in columns.names if name in key))

    @override
    def schema(self) -> pa.Schema:
        return self.columns

    @override
    def key(self) -> tuple[str, ...]:
        return self.key_columns

    @override
    def lookup(self, keys: pa.RecordBatch) -> pa.Table:
        """By the first column of the key; whoever asked takes what it asked for."""
        first = self.key_columns[0]
        files = _dataset(self.path)
        if {field.name: field.type for field in files.schema} != {field.name: field.type for field in self.columns}:
            raise SchemaChangedError(f"the Parquet files at {self.path} have not the same columns as before", hint="start the query anew")
        try:
            rows = files.to_table(columns=self.columns.names, filter=pc.field(first).isin(keys.column(first)))
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(self.path, error) from error
        schema = row_schema(self.columns)
        return pa.Table.from_arrays([*rows.columns, pa.nulls(rows.num_rows, schema.field(-1).type)], schema=schema)


def _dataset(path: Path) -> ds.Dataset:
    try:
        return ds.dataset(path, format="parquet")
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ReferenceUnreadableError:
    # Arrow may quote a value in its message.
    return ReferenceUnreadableError(
        f"the Parquet files at {path} cannot be read: {type(error).__name__}", hint="put whole files in their place"
    )
