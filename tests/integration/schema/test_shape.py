"""Column properties in the catalog beyond name and type, on a real server."""

from __future__ import annotations

import pytest

from penstock.pipeline.schema_changes.catalog_changes import drop_reasons
from penstock.postgres.catalog import CatalogShape, CatalogTable, MissingValue, inspect_shape
from penstock.postgres.connection import SourceAddress, connect
from penstock.schema import TableName
from tests.support.fix_postgres import Database


def shape(database: Database, name: str = "t") -> CatalogShape:
    (oid,) = database.query("SELECT oid FROM pg_class WHERE relname = %s", name)[0]
    with connect(SourceAddress.parse(database.dsn)) as connection:
        return inspect_shape(connection, CatalogTable(oid, TableName("public", name)))


def numbers(found: CatalogShape) -> tuple[dict[str, int], int]:
    assert found.schema.attributes is not None
    return dict(
        zip(found.schema.column_names, found.schema.attributes.numbers, strict=True)
    ), found.schema.attributes.width


def heap(found: CatalogShape) -> str:
    assert found.schema.attributes is not None
    return found.schema.attributes.heap


@pytest.mark.versions(14, 18)
def test_S01_the_value_of_an_added_column_in_older_rows_is_the_default_of_the_server(
    database: Database,
) -> None:
    """Every form of text that an array would quote, and each default that the server does or does not have to
    write into the rows.
    """
    database.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)")
    before = shape(database)
    defaults = {
        "a": "int DEFAULT 5",
        "b": "text NOT NULL DEFAULT 'a \"quoted\", {braced} \\back ünd NULL'",
        "c": "text DEFAULT ''",
        "d": "int[] DEFAULT '{{1,2},{3,NULL}}'",
        "e": "timestamptz DEFAULT '2024-02-29 12:00+02'",
        "f": "numeric(10,2) DEFAULT 'NaN'",
        "g": "bytea DEFAULT '\\x00ff'",
        "h": "text DEFAULT 'null'",
        "i": "int",
        "j": "text DEFAULT NULL",
    }
    for name, declared in defaults.items():
        database.execute(f"ALTER TABLE t ADD {name} {declared}")
    found = shape(database)
    assert heap(found) == heap(before)
    assert found.missing.keys() == set("abcdefgh")
    database.execute("SET timezone = 'UTC'")
    for name, missing in found.missing.items():
        assert missing.text == database.query(f"SELECT {name}::text FROM t")[0][0], name
    database.execute("ALTER TABLE t ALTER a SET DEFAULT 6, ALTER c DROP DEFAULT, ALTER i SET DEFAULT 7")
    assert shape(database).missing == found.missing


def test_S01_values_that_the_server_wrote_into_the_rows_change_the_heap(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)")
    database.execute("ALTER TABLE t ADD a int DEFAULT 5")
    found = shape(database)
    assert found.missing == {"a": MissingValue("5")}
    for statement in (
        "VACUUM FULL t",
        "ALTER TABLE t ADD b float DEFAULT random()",
        "ALTER TABLE t ADD c int GENERATED ALWAYS AS IDENTITY",
        "ALTER TABLE t ALTER id TYPE bigint",
        "TRUNCATE t",
    ):
        database.execute(statement)
        after = shape(database)
        assert after.missing == {}
        assert heap(after) != heap(found)
        found = after
    for statement in (
        "ALTER TABLE t ALTER b TYPE float USING b",
        "ANALYZE t",
        "ALTER TABLE t ALTER c SET STATISTICS 10",
        "VACUUM t",
    ):
        database.execute(statement)
        assert heap(shape(database)) == heap(found), statement


def test_S12_partitions_that_differ_in_an_added_column_say_so(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    database.execute(
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10); "
        "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (10) TO (20)"
    )
    database.execute("INSERT INTO t VALUES (1), (11); ALTER TABLE t ADD a int DEFAULT 5")
    found = shape(database)
    assert found.missing == {"a": MissingValue("5")}
    database.execute(
        "CREATE TABLE t3 (id int NOT NULL, a int); "
        "ALTER TABLE t ATTACH PARTITION t3 FOR VALUES FROM (20) TO (30)"
    )
    assert shape(database).missing == {"a": MissingValue(None)}
    assert heap(shape(database)) != heap(found)


def test_a_value_that_cannot_be_extracted_from_its_array_is_not_shown(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); ALTER TABLE t ADD a box DEFAULT '(1,1),(0,0)'")
    assert shape(database).missing == {"a": MissingValue(None)}


def test_S02_a_number_is_never_given_twice(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, a int, b int)")
    database.execute(
        "ALTER TABLE t DROP b; ALTER TABLE t ADD b int; ALTER TABLE t ADD c int; ALTER TABLE t DROP c; "
        "ALTER TABLE t RENAME a TO x"
    )
    assert numbers(shape(database)) == ({"id": 1, "x": 2, "b": 4}, 5)


def test_S05_an_uncommitted_transaction_is_not_part_of_the_schema(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    (done,) = database.query("SELECT txid_current()")[0]
    with database.connect() as other:
        row = other.execute("SELECT txid_current()").fetchone()
        assert row is not None
        found = shape(database)
        assert found.shows(done)
        assert not found.shows(row[0])
    (later,) = database.query("SELECT txid_current()")[0]
    assert not found.shows(later)
    assert shape(database).shows(later)


def test_S07_a_table_is_found_by_its_oid(database: Database) -> None:
    database.execute("CREATE TABLE kept (id int); CREATE TABLE lost (id int); CREATE SCHEMA other")
    (oids,) = database.query("SELECT 'kept'::regclass::oid::int8, 'lost'::regclass::oid::int8")
    kept, lost, group = (TableName("public", name) for name in ("kept", "lost", "many"))
    database.execute("ALTER TABLE kept SET SCHEMA other; DROP TABLE lost")
    with connect(SourceAddress.parse(database.dsn)) as connection:
        found = drop_reasons(
            connection, {kept: oids[0], lost: oids[1], group: 1 << 62}, lambda name: name.schema == "public"
        )
    assert found == {
        kept: "it is called other.kept now, which is not selected",
        lost: "it was dropped",
        group: "it was dropped",
    }
