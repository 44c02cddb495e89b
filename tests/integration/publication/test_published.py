"""The contents of a publication, read from the catalog: equal to pg_publication_tables, and not blocked by
locks.
"""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import sql

from penstock.postgres.capture_triggers import inspect_trigger_memberships, inspect_triggered
from penstock.postgres.catalog import CatalogTable, inspect_schemas, inspect_tables, inspect_whole_rows
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.membership import check_partition_identities, inspect_memberships
from penstock.postgres.publication import inspect_relations
from penstock.postgres.queries import SCHEMAS_VERSION, query
from penstock.postgres.server import inspect_owner_code, inspect_unreadable
from penstock.postgres.snapshot_export import inspect_outline, inspect_row_filter
from penstock.schema import TableName
from tests.support.fix_postgres import Database, PostgresServer

TABLES = """
CREATE SCHEMA app;
CREATE SCHEMA other;
CREATE TABLE app.plain (id int PRIMARY KEY, v text, w text);
CREATE TABLE app.heir (x int) INHERITS (app.plain);
CREATE TABLE app.stored (id int PRIMARY KEY, double int GENERATED ALWAYS AS (id * 2) STORED);
CREATE TABLE app.dropped (id int PRIMARY KEY, gone int, v text);
ALTER TABLE app.dropped DROP COLUMN gone;
CREATE TABLE app.empty ();
CREATE UNLOGGED TABLE app.unlogged (id int PRIMARY KEY);
CREATE VIEW app.looked AS SELECT 1 AS id;
CREATE TABLE other.plain (id int PRIMARY KEY);
CREATE TABLE app.root (id int, part int, v text, PRIMARY KEY (id, part)) PARTITION BY LIST (part);
CREATE TABLE app.leaf PARTITION OF app.root FOR VALUES IN (1);
CREATE TABLE other.leaf PARTITION OF app.root FOR VALUES IN (2);
CREATE TABLE other.sub PARTITION OF app.root FOR VALUES IN (3) PARTITION BY RANGE (id);
CREATE TABLE app.deep PARTITION OF other.sub FOR VALUES FROM (0) TO (10);
CREATE TABLE other.barren (id int, PRIMARY KEY (id)) PARTITION BY RANGE (id);
CREATE TABLE app.mixed (id int, part int) PARTITION BY LIST (part);
CREATE UNLOGGED TABLE app.mixed_unlogged PARTITION OF app.mixed FOR VALUES IN (1);
CREATE FOREIGN DATA WRAPPER nothing;
CREATE SERVER nowhere FOREIGN DATA WRAPPER nothing;
CREATE FOREIGN TABLE app.mixed_foreign PARTITION OF app.mixed FOR VALUES IN (2) SERVER nowhere;
"""

LISTS = [
    "",
    "FOR ALL TABLES",
    "FOR TABLE app.plain",
    "FOR TABLE ONLY app.plain, other.plain, app.stored, app.dropped, app.empty",
    "FOR TABLE app.root",
    "FOR TABLE app.leaf, other.leaf",
    "FOR TABLE app.root, app.leaf, app.deep",
    "FOR TABLE other.sub, app.leaf",
    "FOR TABLE app.deep",
    "FOR TABLE other.barren",
    "FOR TABLE app.mixed",
]
SINCE_15 = [
    "FOR TABLES IN SCHEMA app",
    "FOR TABLES IN SCHEMA other",
    "FOR TABLES IN SCHEMA app, other",
    "FOR TABLES IN SCHEMA other, TABLE app.root",
    "FOR TABLES IN SCHEMA other, TABLE app.leaf WHERE (id > 1)",
    "FOR TABLES IN SCHEMA app, TABLE app.plain WHERE (id > 1), other.plain WHERE (id > 2)",
    "FOR TABLE app.plain (id, w), app.stored (id)",
    "FOR TABLE app.dropped (id, v) WHERE (id % 2 = 0 AND id <> 7), other.plain",
    "FOR TABLE app.leaf (id, part) WHERE (part = 1), app.deep WHERE (id < 5)",
]
SINCE_15_VIA_ROOT = [
    "FOR TABLE app.root (id, part) WHERE (id > 1)",
    "FOR TABLE app.root WHERE (part > 1), app.leaf (id, part), other.leaf WHERE (id > 1)",
]


@pytest.fixture
def tables(database: Database) -> Database:
    database.execute(TABLES)
    return database


def cases(server: PostgresServer) -> list[str]:
    """The options and lists of publications that this server knows."""
    via_root = "WITH (publish_via_partition_root = true)"
    lists = LISTS if server.version < 15 else [*LISTS, *SINCE_15]
    found = [f"{text} {option}" for text in lists for option in ("", via_root)]
    if server.version >= 15:
        found += [f"{text} {via_root}" for text in SINCE_15_VIA_ROOT]
    if server.version >= 18:
        found += [
            f"{text} WITH (publish_generated_columns = stored)"
            for text in ("FOR ALL TABLES", "FOR TABLE app.stored")
        ]
        found += ["FOR TABLE app.stored (id, double)"]
    return found


def every_relation(connection: Connection) -> dict[TableName, int]:
    rows: list[Any] = connection.execute(
        "SELECT n.nspname, c.relname, c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
    ).fetchall()
    return {TableName(schema, name): oid for schema, name, oid in rows}


def published(connection: Connection, publication: str) -> set[int]:
    """The rows of the CTE `published`, with every relation of the database as candidate."""
    rows = query("published", "catalog" if connection.info.server_version >= SCHEMAS_VERSION else "view")
    statement: Any = f"WITH candidate (oid) AS (SELECT oid FROM pg_class) SELECT oid FROM ({rows}) published"
    return {row[0] for row in connection.execute(statement, {"publication": publication})}  # type: ignore[misc]


@pytest.mark.versions(14, 15, 16, 17, 18)
def test_tables_columns_and_row_filters_are_those_of_pg_publication_tables(
    tables: Database, address: SourceAddress, postgres_server: PostgresServer
) -> None:
    with connect(address) as connection:
        oids = every_relation(connection)
        for number, case in enumerate(cases(postgres_server)):
            name = f"p{number}"
            connection.execute(sql.SQL("CREATE PUBLICATION {} ").format(sql.Identifier(name)) + sql.SQL(case))
            view: list[Any] = connection.execute(
                "SELECT schemaname, tablename, to_jsonb(t) ->> 'rowfilter', to_jsonb(t) -> 'attnames' "
                "FROM pg_publication_tables t WHERE pubname = %s",
                [name],
            ).fetchall()
            expected = {
                TableName(schema, table): (row_filter, columns) for schema, table, row_filter, columns in view
            }
            assert published(connection, name) == {oids[table] for table in expected}, case
            relations = inspect_relations(
                connection, name, [table for table in oids if table.schema in ("app", "other")]
            )
            heaps = {
                relation.name for relation in relations if relation.is_published and relation.kind == "r"
            }
            assert heaps == {table for table in expected if _is_heap(connection, table)}, case
            shapes = inspect_schemas(
                connection, [CatalogTable(oids[table], table) for table in expected], publication=name
            )
            for table, (row_filter, columns) in expected.items():
                assert inspect_row_filter(connection, oids[table], name) == row_filter, (case, table)
                if columns is not None:
                    assert set(shapes[table].column_names) == set(columns) - _hidden(
                        postgres_server, table
                    ), (case, table)
        assert published(connection, "no such publication") == set()


@pytest.mark.versions(14, 15, 18)
def test_N08_a_locked_table_or_partition_does_not_hold_up_questions_about_the_publication(
    tables: Database, address: SourceAddress
) -> None:
    tables.execute("CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root = true)")
    with tables.connect() as holder, connect(address) as connection:
        holder.execute("LOCK TABLE app.plain, ONLY app.leaf IN ACCESS EXCLUSIVE MODE")
        connection.execute("SET lock_timeout = '1s'")
        found = inspect_tables(connection)
        names = [table.name for table in found]
        assert TableName("app", "plain") in names
        assert all(
            schema.columns
            for name, schema in inspect_schemas(connection, found, publication="pub").items()
            if name.name != "empty"
        )
        assert set(inspect_memberships(connection, "pub", names)) == set(names)
        oids = [table.oid for table in found]
        inspect_whole_rows(connection, oids)
        inspect_unreadable(connection, dict.fromkeys(oids, ()))
        inspect_owner_code(connection, oids)
        inspect_triggered(connection, "penstock", names)
        inspect_trigger_memberships(connection, "penstock", names)
        check_partition_identities(connection, names, "pub")
        (unlocked,) = [table for table in found if table.name == TableName("app", "stored")]
        assert inspect_outline(connection, unlocked, publication="pub").outline.membership


def _is_heap(connection: Connection, table: TableName) -> bool:
    row: Any = connection.execute(
        "SELECT relkind FROM pg_class WHERE oid = to_regclass(%s)",
        [sql.Identifier(table.schema, table.name).as_string()],
    ).fetchone()
    return bool(row[0] in ("r", b"r"))


def _hidden(server: PostgresServer, table: TableName) -> set[str]:
    """Before 18 the view may list generated columns, which the server does not publish."""
    return {"double"} if server.version < 18 and table.name == "stored" else set()
