"""UPDATEs that the server refuses because the publication does not contain the table's whole replica
identity.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from penstock.capture.provision import inspect_coverage
from penstock.errors import TableWithoutKeyError
from penstock.postgres.catalog import (
    KeyFault,
    check_mirrorable,
    inspect_key_faults,
    inspect_schemas,
    inspect_tables,
)
from penstock.postgres.connection import SourceAddress, connect
from penstock.schema import TableName
from tests.support.fix_postgres import Database


@pytest.mark.versions(15, 18)
def test_P05_R02_a_column_list_of_a_table_under_replica_identity_full_is_a_blocker_since_its_updates_fail(
    database: Database, address: SourceAddress
) -> None:
    database.execute(
        "CREATE TABLE keyed (id int PRIMARY KEY, v int, secret int); CREATE TABLE bare (id int, v int)"
    )
    database.execute("CREATE TABLE parted (id int PRIMARY KEY, v int, secret int) PARTITION BY RANGE (id)")
    database.execute(
        "CREATE TABLE part PARTITION OF parted FOR VALUES FROM (0) TO (10); "
        "CREATE TABLE rest PARTITION OF parted DEFAULT"
    )
    database.execute(
        "INSERT INTO keyed VALUES (1, 1, 1); INSERT INTO bare VALUES (1, 1); "
        "INSERT INTO parted VALUES (1, 1, 1)"
    )
    for table in ("keyed", "bare", "part"):
        database.execute(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
    listed = "keyed (id, v), bare (id, v) WHERE (id > 0), parted (id, v)"
    database.execute(f"CREATE PUBLICATION pub FOR TABLE {listed} WITH (publish_via_partition_root = true)")
    names = {TableName("public", name) for name in ("keyed", "bare", "parted")}
    for name in names:
        with pytest.raises(psycopg.errors.InvalidColumnReference):
            database.execute(f"UPDATE {name} SET v = 2")
    report = inspect_coverage(address, "pub", names)
    assert [blocker.code for blocker in report.blockers] == ["PEN-1105"] * 3
    assert {table for blocker in report.blockers for table in blocker.tables} == names
    assert [
        blocker.what
        for blocker in report.blockers
        if "partition public.part has REPLICA IDENTITY FULL" in blocker.what
    ]
    for blocker in report.blockers:
        database.execute(blocker.remedy.removeprefix("to publish all its columns: "))
    assert inspect_coverage(address, "pub", names).satisfied
    for name in names:
        database.execute(f"UPDATE {name} SET v = 2")
    shown = "SELECT tablename, attnames::text[], rowfilter IS NOT NULL FROM pg_publication_tables ORDER BY 1"
    assert database.query(shown) == [
        ("bare", ["id", "v"], True),
        ("keyed", ["id", "v"], False),
        ("parted", ["id", "v"], False),
    ]


@pytest.mark.versions(15, 18)
def test_P05_R02_a_column_list_under_full_is_no_blocker_where_nothing_but_inserts_is_published(
    database: Database, address: SourceAddress
) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, v int)")
    database.execute(
        "ALTER TABLE orders REPLICA IDENTITY FULL; "
        "CREATE PUBLICATION pub FOR TABLE orders (id) WITH (publish = 'insert')"
    )
    (blocker,) = inspect_coverage(address, "pub", {TableName("public", "orders")}).blockers
    assert "leaves out" in blocker.what
    database.execute("UPDATE orders SET v = 2")


@pytest.mark.versions(18)
def test_R04_T33_an_identity_with_a_generated_column_that_is_not_published_is_refused_since_its_updates_fail(
    database: Database, address: SourceAddress
) -> None:
    database.execute(
        "CREATE TABLE virtual (id int PRIMARY KEY, v int, g int GENERATED ALWAYS AS (v * 2) VIRTUAL)"
    )
    database.execute(
        "CREATE TABLE stored (id int PRIMARY KEY, v int, g int GENERATED ALWAYS AS (v * 2) STORED)"
    )
    database.execute("CREATE TABLE keyed (v int, g int GENERATED ALWAYS AS (v * 2) STORED PRIMARY KEY)")
    for table in ("virtual", "stored"):
        database.execute(f"ALTER TABLE {table} REPLICA IDENTITY FULL; INSERT INTO {table} VALUES (1, 1)")
    names = {TableName("public", name) for name in ("virtual", "stored", "keyed")}
    (blocker,) = inspect_coverage(address, "own", names).blockers
    assert (blocker.code, blocker.tables) == ("PEN-1405", (TableName("public", "virtual"),)), (
        "stored ones are published by ours"
    )
    database.execute("CREATE PUBLICATION pub FOR TABLE virtual, stored, keyed; INSERT INTO keyed VALUES (1)")
    for name in names:
        with pytest.raises(psycopg.errors.InvalidColumnReference):
            database.execute(f"UPDATE {name} SET v = 2")
    report = inspect_coverage(address, "pub", names)
    assert [blocker.code for blocker in report.blockers] == ["PEN-1405"] * 3
    for blocker in report.blockers:
        database.execute(blocker.remedy)
    assert inspect_coverage(address, "pub", names).satisfied
    for name in names:
        database.execute(f"UPDATE {name} SET v = 2")


def _parted(database: Database, name: str, columns: str, unique: str) -> None:
    """A table with a partition, and a partition of a partition."""
    database.execute(f"CREATE TABLE {name} ({columns}) PARTITION BY RANGE (ts); {unique}")
    database.execute(f"CREATE TABLE {name}_a PARTITION OF {name} FOR VALUES FROM (0) TO (10)")
    database.execute(
        f"CREATE TABLE {name}_b PARTITION OF {name} FOR VALUES FROM (10) TO (20) PARTITION BY RANGE (ts)"
    )
    database.execute(f'CREATE TABLE "{name}_B c" PARTITION OF {name}_b DEFAULT')


@pytest.mark.versions(14, 18)
def test_partitions_that_log_another_key_than_their_root_announces_are_blockers_with_the_statement_for_each(
    database: Database, address: SourceAddress
) -> None:
    _parted(
        database,
        "coded",
        "id int, code text NOT NULL, ts int NOT NULL, PRIMARY KEY (id, ts)",
        "CREATE UNIQUE INDEX by_code ON coded (code, ts)",
    )
    database.execute("ALTER TABLE coded REPLICA IDENTITY USING INDEX by_code")
    _parted(
        database,
        "keyed",
        "id int, code text NOT NULL, ts int, PRIMARY KEY (id, ts)",
        "CREATE UNIQUE INDEX ON keyed (code, ts)",
    )
    database.execute("ALTER TABLE keyed_a REPLICA IDENTITY USING INDEX keyed_a_code_ts_idx")
    _parted(database, "whole", "id int, ts int", "ALTER TABLE whole REPLICA IDENTITY FULL")
    database.execute(
        'ALTER TABLE whole_a ADD PRIMARY KEY (id); ALTER TABLE "whole_B c" REPLICA IDENTITY FULL'
    )
    _parted(
        database, "same", "id int, ts int, PRIMARY KEY (id, ts)", "ALTER TABLE same REPLICA IDENTITY FULL"
    )
    _parted(database, "wide", "id int, ts int, PRIMARY KEY (id, ts)", "SELECT 1")
    database.execute("ALTER TABLE wide_a REPLICA IDENTITY FULL; CREATE TABLE plain (id int PRIMARY KEY)")
    names = {TableName("public", name) for name in ("coded", "keyed", "whole", "same", "wide", "plain")}
    database.execute(
        f"CREATE PUBLICATION pub FOR TABLE {', '.join(map(str, names))} WITH (publish_via_partition_root = "
        "true)"
    )
    report = inspect_coverage(address, "pub", names)
    assert {str(blocker.tables[0]): (blocker.code, blocker.remedy) for blocker in report.blockers} == {
        "public.coded": (
            "PEN-1418",
            (
                'ALTER TABLE "public"."coded_B c" REPLICA IDENTITY USING INDEX "coded_B c_code_ts_idx"; '
                'ALTER TABLE "public"."coded_a" REPLICA IDENTITY USING INDEX "coded_a_code_ts_idx";'
            ),
        ),
        "public.keyed": ("PEN-1418", 'ALTER TABLE "public"."keyed_a" REPLICA IDENTITY DEFAULT;'),
        "public.whole": ("PEN-1418", 'ALTER TABLE "public"."whole_a" REPLICA IDENTITY FULL;'),
    }
    for blocker in report.blockers:
        database.execute(blocker.remedy)
    assert inspect_coverage(address, "pub", names).satisfied
    (blocker,) = inspect_coverage(address, "pub", {TableName("public", "same")}, old_rows=True).blockers
    assert blocker.remedy == (
        'ALTER TABLE "public"."same_B c" REPLICA IDENTITY FULL; '
        'ALTER TABLE "public"."same_a" REPLICA IDENTITY FULL;'
    )
    blockers = inspect_coverage(address, "pub", names, old_rows=True).blockers
    assert {blocker.tables[0].name for blocker in blockers} == {"same", "wide"}, (
        "a table without any whole row announces none"
    )
    assert all(
        'ALTER TABLE "public"."wide" REPLICA' in each.remedy
        for each in blockers
        if each.tables[0].name == "wide"
    ), "its root too"
    for blocker in blockers:
        database.execute(blocker.remedy)
    assert inspect_coverage(address, "pub", names, old_rows=True).satisfied


@pytest.mark.versions(14, 18)
def test_partitions_with_different_keys_are_no_blockers_where_no_key_matters(
    database: Database, address: SourceAddress
) -> None:
    _parted(database, "bare", "id int, ts int", "SELECT 1")
    _parted(database, "whole", "id int, ts int", "ALTER TABLE whole REPLICA IDENTITY FULL")
    _parted(
        database,
        "coded",
        "id int, code int NOT NULL, ts int, PRIMARY KEY (id, ts)",
        "CREATE UNIQUE INDEX by_code ON coded (code, ts)",
    )
    database.execute("ALTER TABLE coded REPLICA IDENTITY USING INDEX by_code")
    for name in ("bare", "whole"):
        database.execute(
            f'ALTER TABLE {name}_a ADD PRIMARY KEY (id); ALTER TABLE "{name}_B c" ADD PRIMARY KEY (id)'
        )
    names = {TableName("public", name) for name in ("bare", "whole", "coded")}
    tables = ", ".join(map(str, names))
    database.execute(f"CREATE PUBLICATION pub FOR TABLE {tables} WITH (publish_via_partition_root = true)")

    def refused(**options: Any) -> set[str]:
        blockers = inspect_coverage(address, "pub", names, **options).blockers
        return {table.name for blocker in blockers if blocker.code == "PEN-1418" for table in blocker.tables}

    assert refused() == {"bare", "whole", "coded"}
    assert refused(unkeyed=names) == {"whole", "coded"}, (
        "the others announce whole old rows, or a key that is not sent"
    )
    assert refused(unkeyed=names, old_rows=True) == {"bare", "whole", "coded"}
    database.execute("ALTER PUBLICATION pub SET (publish = 'insert, truncate')")
    assert refused() == set(), "neither updates nor deletes are published"
    database.execute("ALTER PUBLICATION pub SET (publish = 'insert, delete')")
    assert refused() == {"bare", "whole", "coded"}


@pytest.mark.versions(14, 16, 18)
def test_T33_a_key_with_a_generated_column_that_the_stream_does_not_carry_is_no_key(
    database: Database, address: SourceAddress
) -> None:
    """The remaining columns of it do not identify a row."""
    generated = "a int, b int, g int GENERATED ALWAYS AS (b / 2) STORED, PRIMARY KEY (a, g)"
    database.execute(
        f"CREATE TABLE keyed ({generated}); CREATE TABLE whole ({generated}); "
        "ALTER TABLE whole REPLICA IDENTITY FULL"
    )
    database.execute(f"CREATE TABLE indexed ({generated}, c int NOT NULL UNIQUE)")
    database.execute("ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_c_key")
    database.execute("CREATE PUBLICATION pub FOR TABLE keyed, whole, indexed")
    is_18 = database.query("SELECT current_setting('server_version_num')::int >= 180000")[0][0]
    with connect(address) as connection:
        tables = inspect_tables(connection)
        schemas = inspect_schemas(connection, tables, publication="pub")
        faults = inspect_key_faults(connection, schemas.values())
        planned = inspect_schemas(connection, tables, publication="ours")
    assert {name.name: schema.key for name, schema in schemas.items()} == {
        "indexed": ("c",),
        "keyed": ("a",),
        "whole": (),
    }
    assert {name.name: fault for name, fault in faults.items()} == {
        "keyed": KeyFault.GENERATED,
        "whole": KeyFault.GENERATED,
    }
    keyed = TableName("public", "keyed")
    with pytest.raises(TableWithoutKeyError, match="generated column in its key") as caught:
        check_mirrorable(schemas[keyed], faults[keyed])
    assert "publish_generated_columns = stored" in (caught.value.hint or "")
    assert planned[keyed].key == (("a", "g") if is_18 else ("a",)), (
        "our own publication includes it where it can"
    )
