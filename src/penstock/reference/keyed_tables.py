"""Tables queried by key from executors, in Postgres or Parquet, and the identity of reference tables in
checkpoints.

A checkpoint records the table's OID and publication membership, since changes made while a table was not
published are not in the WAL stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from typing_extensions import override

from penstock.capture.settings import CaptureSettings
from penstock.contracts.connector import SourceCheckpoint
from penstock.contracts.reference import KeyedReferenceTable
from penstock.errors import (
    CheckpointError,
    NoTablesError,
    ReferenceUnreadableError,
    SchemaChangedError,
    TableGapError,
    UnsupportedTableError,
)
from penstock.location import absolute_path
from penstock.postgres.catalog import (
    CatalogTable,
    check_mirrorable,
    inspect_key_faults,
    inspect_schema,
    inspect_tables,
)
from penstock.postgres.chunks import snapshot_schema
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.membership import Membership, inspect_captured_tables
from penstock.postgres.rows_by_key import KeyBatch, can_query_key, read_keys
from penstock.postgres.server import identify_system
from penstock.postgres.snapshot_export import CopyFingerprint, inspect_outline
from penstock.postgres.types.column import TypePolicy
from penstock.reference.history import row_schema
from penstock.reference.parquet import parquet_columns
from penstock.schema import TableName, TableSchema


@dataclass(frozen=True, slots=True)
class TableIdentity:
    """Identity of a reference table in its checkpoints: database system and publication membership."""

    system: str
    membership: Membership

    @classmethod
    def of(cls, checkpoint: SourceCheckpoint) -> TableIdentity:
        try:
            metadata = checkpoint.metadata
            return cls(metadata["system"], Membership(int(metadata["oid"]), metadata["membership"]))
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                "the checkpoint does not name its table",
                hint="start without a checkpoint, which copies the table again",
            ) from error

    def to_metadata(self) -> dict[str, str]:
        return {
            "system": self.system,
            "oid": str(self.membership.oid or 0),
            "membership": self.membership.act,
        }


def inspect_identity(address: SourceAddress, publication: str, table: TableName) -> TableIdentity:
    system = identify_system(address).identifier
    found = inspect_captured_tables(address, publication, lambda name: name == table)
    # For a table that is not published, the membership has no `act`, so the next check reports an
    # interruption.
    return TableIdentity(system, found.members.get(table, Membership(0, "")))


def check_membership(address: SourceAddress, publication: str, table: TableName, before: Membership) -> None:
    """Raise an error if changes of the table may be missing since `before`, its recorded membership."""
    found = inspect_captured_tables(address, publication, lambda name: name == table)
    reason = found.interruption(table, before, must_exist=True)
    if reason is not None:
        raise TableGapError(
            f"changes of the reference table {table} may be missing: it {reason}",
            hint="start without a checkpoint, which copies the table again",
        )


def inspect_shape(
    address: SourceAddress, table: TableName, types: TypePolicy, publication: str | None
) -> TableSchema:
    """The current schema of the table.

    Raises if it cannot be a reference table, for example without a key.
    """
    with connect(address) as connection:
        found = next((each for each in inspect_tables(connection) if each.name == table), None)
        if found is None:
            raise NoTablesError(
                f"{address.describe()} has no table {table} that can be captured",
                hint="check the name, which is case-sensitive",
            )
        schema = inspect_schema(connection, found, types, publication)
        faults = inspect_key_faults(connection, [schema])
    check_mirrorable(schema, faults.get(table))
    return schema


_KEYS_A_QUERY = 10_000


@dataclass(frozen=True, slots=True)
class PostgresKeyedTable(KeyedReferenceTable):
    """A Postgres table whose rows are read through the index of its key. Create it with `inspect`, in the
    driver.
    """

    address: SourceAddress
    outline: CopyFingerprint
    reject_inexact: bool = False

    @classmethod
    def inspect(cls, settings: CaptureSettings, table: TableName) -> PostgresKeyedTable:
        """Inspect the table. Needs neither slot nor publication: only the address and types of `settings` are
        used.
        """
        schema = inspect_shape(settings.address, table, settings.types, None)
        odd = [
            column.name
            for column in schema.columns
            if column.name in schema.key and not can_query_key(column.arrow_type)
        ]
        if odd:
            raise UnsupportedTableError(
                f"rows of {table} cannot be looked up by {odd[0]!r}, which has a nested type",
                hint="keep the table",
            )
        with connect(settings.address) as connection:
            outline = inspect_outline(connection, CatalogTable(schema.oid, table), settings.types).outline
        # `leaves` is empty, so that a rewrite of the table is no error: each lookup is one statement under
        # one snapshot.
        return cls(settings.address, replace(outline, leaves=()), settings.types.rejects_inexact)

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
            KeyBatch(
                tuple(text.slice(at, _KEYS_A_QUERY) for text in texts),
                (nothing.slice(at, _KEYS_A_QUERY),) * len(texts),
            )
            for at in range(0, keys.num_rows, _KEYS_A_QUERY)
        ]
        rows = list(read_keys(self.address, None, self.outline, batches, reject_inexact=self.reject_inexact))
        return pa.Table.from_batches(rows, snapshot_schema(self.outline.schema))


def key_texts(column: pa.Array) -> pa.StringArray:
    """The values as text that Postgres parses."""
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return pa.array(
            [None if value is None else rf"\x{value.hex()}" for value in column.to_pylist()], pa.string()
        )
    if pa.types.is_floating(column.type):
        return pa.array([None if value is None else repr(value) for value in column.to_pylist()], pa.string())
    return column.cast(pa.string())


@dataclass(frozen=True, slots=True)
class ParquetKeyedTable(KeyedReferenceTable):
    """Parquet files. A lookup reads only the row groups that may contain a key. Create it with `inspect`, in
    the driver.

    The files may be replaced at any time by others with the same columns.
    """

    path: Path
    columns: pa.Schema
    key_columns: tuple[str, ...]

    @classmethod
    def inspect(cls, path: str | Path, key: Sequence[str]) -> ParquetKeyedTable:
        """Inspect the files. `key` names the columns that identify a row."""
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
        """Filters by the first column of the key only, so the result may have more rows than requested. The
        caller selects the rows with the requested keys.
        """
        first = self.key_columns[0]
        files = _dataset(self.path)
        if {field.name: field.type for field in files.schema} != {
            field.name: field.type for field in self.columns
        }:
            raise SchemaChangedError(
                f"the Parquet files at {self.path} have different columns than before",
                hint="restart the query",
            )
        try:
            rows = files.to_table(columns=self.columns.names, filter=pc.field(first).isin(keys.column(first)))
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(self.path, error) from error
        schema = row_schema(self.columns)
        return pa.Table.from_arrays(
            [*rows.columns, pa.nulls(rows.num_rows, schema.field(-1).type)], schema=schema
        )


def _dataset(path: Path) -> ds.Dataset:
    try:
        return ds.dataset(path, format="parquet")
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ReferenceUnreadableError:
    # Arrow may quote a value in its message.
    return ReferenceUnreadableError(
        f"the Parquet files at {path} cannot be read: {type(error).__name__}",
        hint="replace them with complete files",
    )
