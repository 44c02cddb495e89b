"""Filters pushed to the source return what Spark's filter returns; Postgres is the oracle for conditions."""

from __future__ import annotations

from penstock.postgres.catalog import inspect_schema, inspect_tables
from penstock.postgres.connection import connect
from penstock.postgres.queries import is_comparable, is_present
from penstock.postgres.types.column import TypePolicy
from tests.support.source.engine import LocalSource


def test_composite_value_with_a_null_in_it_is_present_and_a_number_that_is_a_text_is_not_compared(
    local: LocalSource,
) -> None:
    local.database.execute("DROP TABLE orders")
    local.database.execute("CREATE TYPE pair AS (a int, b int)")
    local.database.execute("CREATE TABLE t (id int PRIMARY KEY, p pair, n numeric)")
    local.database.execute(
        "INSERT INTO t VALUES (1, (1, NULL), 1.0), (2, (NULL, NULL), 1), (3, NULL, 1), (4, (1, 2), 1)"
    )
    with connect(local.address) as connection:
        (table,) = inspect_tables(connection)
        schema = inspect_schema(connection, table, TypePolicy(numeric="string"))
    columns = {column.name: column for column in schema.columns}
    rows = local.database.query(f"SELECT id FROM t WHERE {is_present(columns['p'])} ORDER BY id")
    assert rows == [(1,), (2,), (4,)]
    assert not is_comparable(columns["n"])
