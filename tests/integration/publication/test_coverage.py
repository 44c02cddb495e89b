"""`inspect_coverage` and `ensure_coverage`: which tables are published, which are missing, and which cannot
be added.
"""

from __future__ import annotations

import threading

import pytest

from penstock.capture.provision import ensure_coverage, inspect_coverage
from penstock.contracts.provisioning import CoverageReport
from penstock.errors import LockWaitError
from penstock.postgres import publication as publication_module
from penstock.postgres.catalog import inspect_schemas, inspect_tables
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.membership import Membership, inspect_memberships
from penstock.postgres.server import inspect_role
from penstock.schema import TableName
from tests.support.fix_postgres import Database, PostgresServer
from tests.support.fix_roles import Roles
from tests.support.waiting import wait_for

ORDERS = TableName("public", "orders")
ITEMS = TableName("public", "items")


def published(database: Database) -> list[tuple[str, str]]:
    return database.query("SELECT schemaname::text, tablename::text FROM pg_publication_tables ORDER BY 1, 2")


def codes(report: CoverageReport) -> list[str]:
    return [blocker.code for blocker in report.blockers]


def mend(database: Database, report: CoverageReport) -> None:
    """Paste every remedy, as a person would. Alternatives are separated by `or`: the last one is taken."""
    for blocker in report.blockers:
        database.execute(blocker.remedy.rpartition("or: ")[2].rpartition("or else: ")[2])


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, v text); CREATE TABLE items (id int PRIMARY KEY)"
    )
    return database


def test_P01_inspecting_changes_nothing_and_lists_the_planned_actions(
    shop: Database, address: SourceAddress
) -> None:
    report = inspect_coverage(address, "pub", {ORDERS, ITEMS})
    assert (report.satisfied, report.manageable, report.blockers) == (False, True, ())
    assert report.missing == {ORDERS, ITEMS}
    assert not report.present
    assert shop.query("SELECT 1 FROM pg_publication") == []
    shop.execute(report.remediation[0])
    assert inspect_coverage(address, "pub", {ORDERS, ITEMS}).satisfied


@pytest.mark.versions(14, 15, 16, 17, 18)
def test_P01_ensuring_reports_the_state_before_its_actions(shop: Database, address: SourceAddress) -> None:
    first = ensure_coverage(address, "pub", {ORDERS}, manage=True)
    assert (first.satisfied, first.manageable) == (False, True)
    assert first.missing == {ORDERS}
    again = ensure_coverage(address, "pub", {ORDERS}, manage=True)
    assert (again.satisfied, again.missing, again.remediation) == (True, frozenset(), ())
    assert again.present == {ORDERS}
    more = ensure_coverage(address, "pub", {ORDERS, ITEMS}, manage=True)
    assert more.present == {ORDERS}
    assert more.missing == {ITEMS}
    assert published(shop) == [("public", "items"), ("public", "orders")]


def test_P01_a_gap_that_is_not_ours_to_manage_is_left(shop: Database, address: SourceAddress) -> None:
    report = ensure_coverage(address, "pub", {ORDERS}, manage=False)
    assert (report.satisfied, report.manageable) == (False, True)
    assert published(shop) == []


def test_P01_nothing_required_is_nothing_to_do(shop: Database, address: SourceAddress) -> None:
    report = ensure_coverage(address, "pub", set(), manage=True)
    assert (report.satisfied, report.manageable, report.remediation) == (True, False, ())
    assert shop.query("SELECT 1 FROM pg_publication") == []


def test_P02_a_publication_for_all_tables_satisfies_any_filter(
    shop: Database, address: SourceAddress
) -> None:
    shop.execute("CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root = true)")
    assert ensure_coverage(address, "pub", {ORDERS}, manage=True).satisfied


def test_P02_tables_that_a_publication_for_all_tables_cannot_hold_are_blockers(
    shop: Database, address: SourceAddress
) -> None:
    """No table can be added to such a publication, and the server excludes system tables."""
    shop.execute("CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root = true)")
    features = TableName("information_schema", "sql_features")
    shop.execute(f"ALTER TABLE {features} REPLICA IDENTITY FULL")
    report = ensure_coverage(address, "pub", {ORDERS, features}, manage=True)
    assert (report.satisfied, report.manageable, report.present) == (False, False, frozenset({ORDERS}))
    (blocker,) = report.blockers
    assert (blocker.code, blocker.what, blocker.remedy, blocker.tables) == (
        "PEN-1105",
        "publication pub is FOR ALL TABLES, but does not contain information_schema.sql_features",
        "use another publication",
        (features,),
    )


@pytest.mark.versions(15, 18)
def test_P06_tables_of_a_schema_and_tables_in_several_publications(
    shop: Database, address: SourceAddress
) -> None:
    shop.execute("CREATE SCHEMA other; CREATE TABLE other.t (id int PRIMARY KEY)")
    shop.execute(
        "CREATE PUBLICATION pub FOR TABLES IN SCHEMA other; "
        "CREATE PUBLICATION another FOR TABLE orders, other.t"
    )
    report = ensure_coverage(address, "pub", {ORDERS, TableName("other", "t")}, manage=True)
    assert report.present == {TableName("other", "t")}
    assert report.missing == {ORDERS}
    assert inspect_coverage(address, "pub", {ORDERS, TableName("other", "t")}).satisfied


def test_P02_published_tables_stay_published(shop: Database, address: SourceAddress) -> None:
    shop.execute("CREATE PUBLICATION pub FOR TABLE items")
    ensure_coverage(address, "pub", {ORDERS}, manage=True)
    assert published(shop) == [("public", "items"), ("public", "orders")]


@pytest.mark.parametrize("publish", ["insert", "insert, update, delete", "", "update"])
def test_P03_a_publication_that_leaves_operations_out_is_a_blocker(
    shop: Database, address: SourceAddress, publish: str
) -> None:
    shop.execute(f"CREATE PUBLICATION pub FOR TABLE orders WITH (publish = '{publish}')")
    report = ensure_coverage(address, "pub", {ORDERS, ITEMS}, manage=True)
    assert (report.satisfied, report.manageable, codes(report)) == (False, False, ["PEN-1105"])
    assert "truncate" in report.blockers[0].what
    assert published(shop) == [("public", "orders")]
    mend(shop, report)
    assert ensure_coverage(address, "pub", {ORDERS, ITEMS}, manage=True).manageable


@pytest.mark.versions(14, 18)
def test_P04_partitioned_tables_need_publish_via_partition_root(
    shop: Database, address: SourceAddress
) -> None:
    shop.execute("CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    shop.execute("CREATE TABLE part PARTITION OF parted FOR VALUES FROM (0) TO (10)")
    parted = TableName("public", "parted")
    shop.execute("CREATE PUBLICATION pub FOR TABLE orders, parted")
    assert inspect_coverage(address, "pub", {ORDERS}).satisfied
    report = inspect_coverage(address, "pub", {ORDERS, parted})
    assert (report.satisfied, report.missing, codes(report)) == (False, frozenset(), ["PEN-1105"])
    assert report.blockers[0].tables == (parted,)
    mend(shop, report)
    assert inspect_coverage(address, "pub", {ORDERS, parted}).satisfied
    part = inspect_coverage(address, "pub", {TableName("public", "part")})
    assert "public.parted" in part.blockers[0].what


@pytest.mark.versions(15, 18)
def test_P05_a_column_list_without_the_key_is_a_blocker(shop: Database, address: SourceAddress) -> None:
    shop.execute(
        "CREATE TABLE pair (v int, a int, b int, PRIMARY KEY (b, a)); "
        "CREATE PUBLICATION pub FOR TABLE orders (v, id), pair (v, a)"
    )
    pair = TableName("public", "pair")
    report = inspect_coverage(address, "pub", {ORDERS, pair})
    assert [(blocker.code, blocker.tables) for blocker in report.blockers] == [("PEN-1105", (pair,))]
    mend(shop, report)
    assert inspect_coverage(address, "pub", {ORDERS, pair}).satisfied


def test_R04_a_table_whose_updates_would_fail_once_published_is_refused(
    shop: Database, address: SourceAddress
) -> None:
    shop.execute("CREATE TABLE keyless (id int, v int); INSERT INTO keyless VALUES (1, 1)")
    shop.execute("CREATE TABLE deferred (id int PRIMARY KEY DEFERRABLE); INSERT INTO deferred VALUES (1)")
    shop.execute(
        "CREATE TABLE nothing (id int PRIMARY KEY); ALTER TABLE nothing REPLICA IDENTITY NOTHING; "
        "INSERT INTO nothing VALUES (1)"
    )
    shop.execute(
        "CREATE TABLE parted (id int) PARTITION BY RANGE (id); ALTER TABLE parted REPLICA IDENTITY FULL"
    )
    shop.execute(
        "CREATE TABLE part PARTITION OF parted FOR VALUES FROM (0) TO (10); INSERT INTO parted VALUES (1)"
    )
    names = ("keyless", "deferred", "nothing", "parted")
    required = {TableName("public", name) for name in names}
    report = ensure_coverage(address, "pub", required | {ORDERS}, manage=True)
    assert codes(report) == ["PEN-1405"] * 4
    assert all("REPLICA IDENTITY FULL" in blocker.remedy for blocker in report.blockers)
    better = {
        "deferred": "USING INDEX",
        "keyless": "ADD PRIMARY KEY",
        "nothing": "REPLICA IDENTITY DEFAULT",
        "parted": "ADD PRIMARY KEY",
    }
    assert {
        blocker.tables[0].name: better[blocker.tables[0].name] in blocker.remedy
        for blocker in report.blockers
    } == dict.fromkeys(names, True)
    for name in names:
        shop.execute(f"UPDATE {name} SET id = id + 1; DELETE FROM {name} WHERE id = 3")
    # The claim itself: publishing them does break the application.
    shop.execute("CREATE PUBLICATION broken FOR TABLE keyless, deferred, nothing, parted")
    for name in names:
        with pytest.raises(Exception, match="does not have a replica identity"):
            shop.execute(f"UPDATE {name} SET id = id + 1")
    shop.execute("DROP PUBLICATION broken")
    for table in ("keyless", "deferred", "nothing", "part"):
        shop.execute(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
    assert ensure_coverage(address, "pub", required | {ORDERS}, manage=True).manageable
    for name in names:
        shop.execute(f"UPDATE {name} SET id = id + 1")


def test_R18_tables_that_never_enter_the_log_are_named_with_the_reason(
    shop: Database, address: SourceAddress
) -> None:
    shop.execute(
        "CREATE VIEW seen AS SELECT * FROM orders; CREATE MATERIALIZED VIEW kept AS SELECT * FROM orders"
    )
    shop.execute("CREATE UNLOGGED TABLE fast (id int PRIMARY KEY); CREATE SEQUENCE numbers")
    shop.execute("CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    shop.execute("CREATE UNLOGGED TABLE part PARTITION OF parted FOR VALUES FROM (0) TO (10)")
    shop.execute("CREATE FOREIGN DATA WRAPPER nowhere; CREATE SERVER far FOREIGN DATA WRAPPER nowhere")
    shop.execute("CREATE FOREIGN TABLE distant (id int) SERVER far")
    names = ("absent", "distant", "fast", "kept", "numbers", "parted", "seen")
    report = inspect_coverage(address, "pub", {TableName("public", name) for name in names})
    reasons = {blocker.tables[0].name: blocker.what for blocker in report.blockers}
    words = (
        "no table",
        "a foreign table",
        "unlogged",
        "a materialized view",
        "a sequence",
        "partition public.part",
        "a view",
    )
    assert {name: word in reasons[name] for name, word in zip(names, words, strict=True)} == dict.fromkeys(
        names, True
    )
    shop.execute(next(blocker.remedy for blocker in report.blockers if blocker.tables[0].name == "fast"))
    assert ensure_coverage(address, "pub", {TableName("public", "fast")}, manage=True).manageable


def test_R18_an_inheritance_child_is_a_separate_table(shop: Database, address: SourceAddress) -> None:
    shop.execute("CREATE TABLE child (PRIMARY KEY (id)) INHERITS (orders)")
    ensure_coverage(address, "pub", {ORDERS}, manage=True)
    assert published(shop) == [("public", "orders")]
    assert inspect_coverage(address, "pub", {TableName("public", "child")}).missing


@pytest.mark.versions(14, 18)
def test_P08_leaving_and_joining_again_is_distinguished_from_staying(
    shop: Database, address: SourceAddress, postgres_server: PostgresServer
) -> None:
    def memberships() -> dict[TableName, Membership]:
        with connect(address) as connection:
            return inspect_memberships(connection, "pub", [ORDERS, ITEMS])

    assert memberships() == {}
    shop.execute("CREATE PUBLICATION pub FOR TABLE orders, items")
    first = memberships()
    shop.execute(
        "ALTER PUBLICATION pub SET TABLE orders, items; "
        "ALTER PUBLICATION pub SET (publish = 'insert, update, delete, truncate')"
    )
    assert memberships() == first
    shop.execute("ALTER PUBLICATION pub DROP TABLE orders; ALTER PUBLICATION pub ADD TABLE orders")
    second = memberships()
    assert (second[ORDERS] != first[ORDERS], second[ITEMS] == first[ITEMS]) == (True, True)
    if postgres_server.version >= 15:
        shop.execute("ALTER PUBLICATION pub SET TABLE orders, items WHERE (id > 5)")
        assert memberships()[ITEMS] != second[ITEMS]
    shop.execute("DROP PUBLICATION pub; CREATE PUBLICATION pub FOR ALL TABLES")
    third = memberships()
    shop.execute("DROP PUBLICATION pub; CREATE PUBLICATION pub FOR ALL TABLES")
    assert all(memberships()[table] != third[table] for table in (ORDERS, ITEMS))


def test_R17_names_are_compared_as_they_are(shop: Database, address: SourceAddress) -> None:
    names = ['odd "name"', "a_c", "abc", "A_C", "per%cent", "back\\slash", " blank ", "dot.ted", "semi;colon"]
    for name in names:
        quoted = name.replace('"', '""')
        shop.execute(f'CREATE TABLE "{quoted}" (id int PRIMARY KEY)')
    ensure_coverage(address, 'pub "x"', {TableName("public", "a_c")}, manage=True)
    assert published(shop) == [("public", "a_c")]
    required = {TableName("public", name) for name in names}
    report = ensure_coverage(address, 'pub "x"', required, manage=True)
    assert report.missing == required - {TableName("public", "a_c")}
    assert inspect_coverage(address, 'pub "x"', required).satisfied


def test_P01_a_locked_table_is_waited_for_only_so_long_and_its_holder_is_named(
    shop: Database, address: SourceAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication_module, "LOCK_SECONDS", 1.0)
    holder = shop.connect()
    holder.execute("LOCK TABLE orders IN ACCESS EXCLUSIVE MODE")
    try:
        with pytest.raises(LockWaitError, match=f"process {holder.info.backend_pid} ") as caught:
            ensure_coverage(address, "pub", {ORDERS, ITEMS}, manage=True)
        assert f"pg_terminate_backend({holder.info.backend_pid})" in (caught.value.hint or "")
        assert published(shop) == []
        timer = threading.Timer(0.3, holder.rollback)
        timer.start()
        ensure_coverage(address, "pub", {ORDERS, ITEMS}, manage=True)
        timer.join()
    finally:
        holder.close()
    assert len(published(shop)) == 2


def test_P09_many_tables_take_no_more_statements_than_few(database: Database, address: SourceAddress) -> None:
    """Each of our statements is one transaction, and the server counts transactions."""
    make = "FOR i IN 1..300 LOOP EXECUTE format('CREATE TABLE t%s (id int PRIMARY KEY)', i); END LOOP;"
    database.execute(f"DO $$ BEGIN {make} END $$")
    tables = {TableName("public", f"t{number}") for number in range(1, 301)}
    before = _transactions(database)
    with connect(address, "penstock count") as connection:
        assert len(inspect_schemas(connection, inspect_tables(connection))) == 300
    assert ensure_coverage(address, "pub", tables, manage=True).manageable
    assert inspect_coverage(address, "pub", tables).satisfied
    assert _transactions(database) - before < 50


def _transactions(database: Database) -> int:
    """Sessions report their statistics when they end; ours have ended when only the test is connected."""
    others = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    wait_for(lambda: not database.query(others), "the end of our sessions", lambda: database.query(others))
    database.query("SELECT pg_stat_clear_snapshot()")
    count: int = database.query(
        "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    )[0][0]
    return count


# --- who may do what ----------------------------------------------------------------------------------------


@pytest.mark.versions(14, 18)
def test_C04_every_right_that_is_missing_is_named_with_its_grant(shop: Database, roles: Roles) -> None:
    owner, plain = roles.create("owner"), roles.create("plain", "REPLICATION")
    shop.execute(
        f"CREATE SCHEMA shut; CREATE TABLE shut.t (id int PRIMARY KEY); ALTER TABLE orders OWNER TO {owner}"
    )
    shop.execute(f"ALTER TABLE shut.t OWNER TO {owner}; REVOKE CREATE ON DATABASE {shop.name} FROM PUBLIC")
    required = {ORDERS, TableName("shut", "t")}
    address = roles.address(plain)
    report = ensure_coverage(address, "pub", required, manage=True)
    assert (report.satisfied, report.manageable) == (False, False)
    assert set(codes(report)) == {"PEN-1104"}
    text = " ".join(blocker.what for blocker in report.blockers)
    assert all(
        part in text
        for part in (
            "may not create publications",
            "may not use schema shut",
            f"only {owner}",
            "public.orders, shut.t",
        )
    )
    grants = [blocker.remedy for blocker in report.blockers if blocker.remedy.startswith("GRANT")]
    assert len(grants) == 2
    for grant in grants:
        shop.execute(grant)
    left = ensure_coverage(address, "pub", required, manage=True)
    assert [blocker.remedy for blocker in left.blockers] == [f"as a superuser: {left.remediation[0]}"]
    shop.execute(left.remediation[0])
    assert inspect_coverage(address, "pub", required).satisfied


@pytest.mark.versions(14, 18)
def test_C04_the_owner_of_the_tables_needs_no_superuser(shop: Database, roles: Roles) -> None:
    owner = roles.create("owner")
    shop.execute(f"ALTER TABLE orders OWNER TO {owner}; GRANT CREATE ON DATABASE {shop.name} TO {owner}")
    assert ensure_coverage(roles.address(owner), "pub", {ORDERS}, manage=True).manageable
    assert published(shop) == [("public", "orders")]


@pytest.mark.versions(14, 18)
def test_C04_a_read_only_role_needs_nothing_more_when_everything_exists(shop: Database, roles: Roles) -> None:
    plain = roles.create("plain")
    shop.execute("CREATE PUBLICATION pub FOR TABLE orders")
    report = ensure_coverage(roles.address(plain), "pub", {ORDERS}, manage=True)
    assert report.satisfied
    lacking = ensure_coverage(roles.address(plain), "pub", {ORDERS, ITEMS}, manage=True)
    assert not lacking.manageable
    assert any(
        "belongs to postgres" in blocker.what and "ALTER PUBLICATION" in blocker.remedy
        for blocker in lacking.blockers
    )


@pytest.mark.versions(14, 18)
def test_C09_a_read_only_role_is_reported_before_any_change(shop: Database, roles: Roles) -> None:
    reader = roles.create("reader", "SUPERUSER")
    shop.execute(f"ALTER ROLE {reader} SET default_transaction_read_only = on")
    report = ensure_coverage(roles.address(reader), "pub", {ORDERS}, manage=True)
    assert codes(report) == ["PEN-1106"]
    shop.execute(report.blockers[0].remedy.partition(" or, ")[0])
    assert ensure_coverage(roles.address(reader), "pub", {ORDERS}, manage=True).manageable


@pytest.mark.parametrize(
    ("service", "grant"),
    [
        ("rds_replication", "GRANT rds_replication TO"),
        ("rds_superuser", "ALTER ROLE"),
        ("azure_pg_admin", "ALTER ROLE"),
        ("cloudsqlsuperuser", "ALTER ROLE"),
    ],
)
def test_C04_an_administrator_of_a_managed_service_needs_the_tables_of_others_too(
    shop: Database, roles: Roles, service: str, grant: str
) -> None:
    """No superuser: the service's role may create publications, but cannot publish tables that it does not
    own.
    """
    owner, admin = roles.create("owner"), roles.create("admin", "REPLICATION")
    shop.execute(
        f"ALTER TABLE items OWNER TO {owner}; ALTER TABLE orders OWNER TO {admin}; CREATE ROLE {service}"
    )
    shop.execute(f"GRANT {service} TO {admin}; GRANT CREATE ON DATABASE {shop.name} TO {service}")
    try:
        address = roles.address(admin)
        with connect(address) as connection:
            role = inspect_role(connection)
        assert role.services == (service,)
        assert role.replication_grant().startswith(grant)
        assert [
            blocker.tables
            for blocker in ensure_coverage(address, "pub", {ORDERS, ITEMS}, manage=True).blockers
        ] == [(ITEMS,)]
        assert published(shop) == [], "a start that fails changes nothing"
        report = ensure_coverage(address, "pub", {ORDERS, ITEMS}, manage=True, partly=True)
        assert report.addable == {ORDERS}
        assert report.missing == {ORDERS, ITEMS}
        assert published(shop) == [("public", "orders")]
        assert ensure_coverage(address, "pub", {ORDERS}, manage=True).satisfied
    finally:
        shop.execute(f"DROP OWNED BY {service}; DROP ROLE {service}")


def test_publication_of_a_role_that_could_leave_out_rows_of_others_is_not_used(
    shop: Database, address: SourceAddress, roles: Roles
) -> None:
    """The owner of the database may have created it, or the owner of all the tables, who controls their rows
    anyway.
    """
    maker = roles.create("maker")
    shop.execute(
        f"GRANT CREATE ON DATABASE {shop.name} TO {maker}; CREATE PUBLICATION pub FOR TABLE orders, items"
    )
    shop.execute(f"ALTER PUBLICATION pub OWNER TO {maker}; ALTER TABLE orders OWNER TO {maker}")
    report = ensure_coverage(address, "pub", {ORDERS, ITEMS}, manage=True)
    assert codes(report) == ["PEN-1108"]
    assert f"belongs to role {maker}" in report.blockers[0].what
    assert inspect_coverage(address, "pub", {ORDERS}).satisfied
    assert inspect_coverage(address.trusting([maker]), "pub", {ORDERS, ITEMS}).satisfied
    shop.execute(f"ALTER DATABASE {shop.name} OWNER TO {maker}")
    assert inspect_coverage(address, "pub", {ORDERS, ITEMS}).satisfied
    shop.execute(f"ALTER DATABASE {shop.name} OWNER TO postgres")
    shop.execute(report.blockers[0].remedy.partition(" or ")[0])
    assert inspect_coverage(address, "pub", {ORDERS, ITEMS}).satisfied
