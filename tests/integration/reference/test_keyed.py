"""Rows of a Postgres table, read by key."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from penstock.capture.settings import CaptureSettings
from penstock.errors import TableWithoutKeyError
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.chunks import plan_chunks, read_chunk
from penstock.postgres.connection import SourceAddress, connect
from penstock.reference.history import key_values
from penstock.reference.join import Asked, LookupFinder
from penstock.reference.keyed_tables import PostgresKeyedTable
from penstock.schema import TableName
from tests.support.fix_postgres import Database

KEYS = {
    "int": "g::int",
    "bigint": "g * 10000000000",
    "numeric(20,4)": "g + 0.5",
    "text": "'k ' || g || chr(9) || '\"\\'",
    "varchar(20)": "'v' || g",
    "uuid": "('00000000-0000-0000-0000-00000000000' || g)::uuid",
    "boolean": "g = 1",
    "date": "date '2024-02-28' + g",
    "timestamptz": "timestamptz '2024-02-28 23:59:59.123456+02' + g * interval '1 day'",
    "timestamp": "timestamp '1900-01-01 00:00:00.000001' + g * interval '1 hour'",
    "time": "time '12:34:56.789' + g * interval '1 minute'",
    "bytea": "decode('00ff0' || g, 'hex')",
    "double precision": "g / 3.0",
}


@pytest.fixture
def settings(database: Database, tmp_path: Path) -> CaptureSettings:
    return CaptureSettings(SourceAddress.parse(database.dsn), "unused", "unused", tmp_path / "spool")


def test_every_existing_key_is_found_and_no_other(database: Database, settings: CaptureSettings) -> None:
    for number, (type_name, expression) in enumerate(KEYS.items()):
        table = TableName("public", f"t{number}")
        database.execute(f"CREATE TABLE {table} (note text, k {type_name} PRIMARY KEY)")
        count = 2 if type_name == "boolean" else 5
        database.execute(
            f"INSERT INTO {table} SELECT 'note ' || g, {expression} FROM generate_series(1, {count}) g"
        )
        keyed = PostgresKeyedTable.inspect(settings, table)
        everything = keyed.lookup(all_keys(keyed, table))
        assert sorted(everything.column("note").to_pylist()) == [
            f"note {each}" for each in range(1, count + 1)
        ], type_name
        database.execute(f"DELETE FROM {table} WHERE note = 'note 1'")
        left = keyed.lookup(
            pa.RecordBatch.from_arrays([pa.concat_arrays(everything.column("k").chunks)], ["k"])
        )
        assert sorted(left.column("note").to_pylist()) == [f"note {each}" for each in range(2, count + 1)], (
            type_name
        )


def all_keys(keyed: PostgresKeyedTable, table: TableName) -> pa.RecordBatch:
    """The rows of the server, decoded by the decoder of the stream."""
    with connect(keyed.address) as connection:
        (chunk,) = plan_chunks(
            connection, CatalogTable(keyed.outline.schema.oid, table), keyed.outline.schema, 1 << 30, None
        )
    rows = pa.Table.from_batches(read_chunk(keyed.address, None, chunk)).combine_chunks()
    return rows.select(["k"]).to_batches()[0]


def test_composite_keys_partitions_and_rewritten_tables(
    database: Database, settings: CaptureSettings
) -> None:
    database.execute(
        "CREATE TABLE parted (a int, b text, note text, PRIMARY KEY (a, b)) PARTITION BY LIST (a)"
    )
    for number in range(3):
        database.execute(f"CREATE TABLE part{number} PARTITION OF parted FOR VALUES IN ({number})")
    database.execute("INSERT INTO parted SELECT g % 3, 'b' || g, 'note ' || g FROM generate_series(0, 8) g")
    finder = LookupFinder(
        PostgresKeyedTable.inspect(settings, TableName("public", "parted")), 0, 0, 100, "parted"
    )
    columns = [pa.array([1, 2, 0, None], pa.int64()), pa.array(["b1", "b1", "b3", "b1"])]
    asked = Asked(key_values(columns, ["a", "b"]), columns)
    assert finder.find(asked).rows.column("note").to_pylist() == ["note 1", None, "note 3", None]
    database.execute("VACUUM FULL part1")
    database.execute("TRUNCATE part0")
    assert finder.find(asked).rows.column("note").to_pylist() == ["note 1", None, None, None]


def test_table_without_key_cannot_be_read_by_key(database: Database, settings: CaptureSettings) -> None:
    database.execute("CREATE TABLE loose (a int)")
    with pytest.raises(TableWithoutKeyError):
        PostgresKeyedTable.inspect(settings, TableName("public", "loose"))
