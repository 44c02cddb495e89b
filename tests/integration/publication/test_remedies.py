"""The statements that reports print: pasted unchanged, they fix the problem and break nothing."""

from __future__ import annotations

import threading

import psycopg
import pytest

from penstock.capture.provision import ensure_coverage, inspect_coverage
from penstock.errors import LockWaitError
from penstock.postgres import publication as publication_module
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.membership import Membership, inspect_memberships
from penstock.schema import TableName
from tests.support.fix_postgres import Database
from tests.support.fix_roles import Roles

ORDERS = TableName("public", "orders")
ITEMS = TableName("public", "items")
PARTED = TableName("public", "parted")


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, v text); CREATE TABLE items (id int PRIMARY KEY)"
    )
    database.execute("CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    return database


def test_R04_the_statement_that_closes_the_gap_leaves_out_unpublishable_columns(
    shop: Database, address: SourceAddress
) -> None:
    shop.execute(
        "CREATE TABLE keyless (id int); INSERT INTO keyless VALUES (1); CREATE VIEW seen AS SELECT 1 AS id"
    )
    hopeless = {TableName("public", name) for name in ("keyless", "seen", "absent")}
    report = inspect_coverage(address, "pub", {ORDERS} | hopeless)
    assert (report.manageable, report.missing) == (False, frozenset({ORDERS} | hopeless))
    shop.execute(report.remediation[0])
    shop.execute("UPDATE keyless SET id = 2")
    assert inspect_coverage(address, "pub", {ORDERS}).satisfied
    assert inspect_coverage(address, "other", hopeless).remediation == ()


def test_R04_a_partitioned_table_without_partitions_uses_its_own_key(
    shop: Database, address: SourceAddress
) -> None:
    shop.execute("CREATE TABLE bare (id int) PARTITION BY RANGE (id)")
    assert inspect_coverage(address, "pub", {PARTED}).manageable
    assert [
        blocker.code for blocker in inspect_coverage(address, "pub", {TableName("public", "bare")}).blockers
    ] == ["PEN-1405"]


def test_R04_the_partition_at_fault_is_named(shop: Database, address: SourceAddress) -> None:
    shop.execute(
        'CREATE TABLE "a {b}" PARTITION OF parted FOR VALUES FROM (0) TO (10); '
        'ALTER TABLE "a {b}" REPLICA IDENTITY NOTHING'
    )
    shop.execute("CREATE TABLE sound PARTITION OF parted FOR VALUES FROM (10) TO (20)")
    (blocker,) = inspect_coverage(address, "pub", {PARTED}).blockers
    assert 'partition public."a {b}" of table public.parted has REPLICA IDENTITY NOTHING' in blocker.what
    shop.execute(blocker.remedy.partition(" or else: ")[0])
    assert inspect_coverage(address, "pub", {PARTED}).manageable


@pytest.mark.versions(15, 18)
def test_P05_a_column_list_is_mended_without_showing_more_than_before(
    shop: Database, address: SourceAddress
) -> None:
    shop.execute('CREATE TABLE private ("I d" int PRIMARY KEY, tenant int, secret text, shown bool)')
    shop.execute(
        "CREATE PUBLICATION pub FOR TABLE private (tenant, shown) "
        "WHERE (shown) WITH (publish_via_partition_root = true)"
    )
    private = TableName("public", "private")
    (blocker,) = inspect_coverage(address, "pub", {private}).blockers
    shop.execute(blocker.remedy)
    assert inspect_coverage(address, "pub", {private}).satisfied
    assert shop.query("SELECT attnames::text[], rowfilter FROM pg_publication_tables") == [
        (["I d", "tenant", "shown"], "shown")
    ]


@pytest.mark.versions(15, 18)
def test_P05_a_column_list_of_a_locked_table_is_not_waited_for_without_end(
    shop: Database, address: SourceAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication_module, "LOCK_SECONDS", 1.0)
    shop.execute("CREATE PUBLICATION pub FOR TABLE orders (v) WHERE (v > 'a')")
    with shop.connect() as holder:
        holder.execute("LOCK TABLE orders IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(
            LockWaitError, match=rf"row filters of publication pub: process {holder.info.backend_pid} "
        ):
            inspect_coverage(address, "pub", {ORDERS})


@pytest.mark.versions(15, 18)
def test_P08_a_schema_that_left_and_returned_is_distinguished_from_one_that_stayed(
    shop: Database, address: SourceAddress
) -> None:
    def memberships() -> dict[TableName, Membership]:
        with connect(address) as connection:
            return inspect_memberships(connection, "pub", [ORDERS, ITEMS])

    shop.execute("CREATE SCHEMA other; CREATE PUBLICATION pub FOR TABLES IN SCHEMA public")
    first = memberships()
    shop.execute(
        "ALTER PUBLICATION pub SET TABLES IN SCHEMA public, other; CREATE TABLE another (id int PRIMARY KEY)"
    )
    assert memberships() == first
    shop.execute(
        "ALTER PUBLICATION pub DROP TABLES IN SCHEMA public; "
        "ALTER PUBLICATION pub ADD TABLES IN SCHEMA public"
    )
    assert all(memberships()[table] != first[table] for table in (ORDERS, ITEMS))


def test_C04_a_statement_for_a_role_can_be_run_by_it_and_is_printed_once(
    shop: Database, roles: Roles
) -> None:
    one, two, plain = roles.create("one"), roles.create("two"), roles.create("plain")
    shop.execute(
        f"ALTER TABLE orders OWNER TO {one}; ALTER TABLE items OWNER TO {two}; "
        f"GRANT CREATE ON DATABASE {shop.name} TO {two}, {plain}"
    )

    def told(required: set[TableName], publication: str = "pub") -> str:
        report = inspect_coverage(roles.address(plain), publication, required)
        (remedy,) = [blocker.remedy for blocker in report.blockers if report.remediation[0] in blocker.remedy]
        who = remedy.removesuffix(report.remediation[0])
        if who != "as a superuser: ":
            role = who.removeprefix("as ").removesuffix(": ")
            with psycopg.connect(roles.address(role).conninfo("test")) as connection:
                connection.execute(report.remediation[0].encode())
                connection.rollback()
        return who

    assert told({ORDERS}) == "as a superuser: "
    assert told({ITEMS}) == f"as {two}: "
    assert told({ORDERS, ITEMS}) == "as a superuser: "
    shop.execute(
        f"CREATE PUBLICATION theirs; ALTER PUBLICATION theirs OWNER TO {two}; "
        f"REVOKE CREATE ON DATABASE {shop.name} FROM {two}"
    )
    assert told({ITEMS}, "theirs") == f"as {two}: "
    assert told({ORDERS}, "theirs") == "as a superuser: "


def test_C04_tables_left_out_of_a_publication_do_not_hide_who_may_add_to_it(
    shop: Database, roles: Roles
) -> None:
    plain = roles.create("plain")
    shop.execute("CREATE SCHEMA shut; ALTER TABLE parted SET SCHEMA shut; CREATE PUBLICATION pub")
    report = inspect_coverage(roles.address(plain), "pub", {TableName("shut", "parted")})
    whats = [blocker.what for blocker in report.blockers]
    parts = (
        "under the names of their partitions",
        "may not use schema shut",
        "belongs to postgres",
        "only postgres, who owns shut.parted",
    )
    assert [part for part in parts if not any(part in what for what in whats)] == []


def test_P01_the_holder_of_a_lock_is_named_without_hidden_details(
    shop: Database, roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication_module, "LOCK_SECONDS", 1.0)
    owner = roles.create("owner")
    shop.execute(f"ALTER TABLE orders OWNER TO {owner}; GRANT CREATE ON DATABASE {shop.name} TO {owner}")
    with shop.connect() as holder:
        holder.execute("LOCK TABLE orders IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(
            LockWaitError, match=rf"process {holder.info.backend_pid} \(role postgres\) has held"
        ):
            ensure_coverage(roles.address(owner), "pub", {ORDERS}, manage=True)


def test_P01_two_that_ensure_at_once_both_succeed(shop: Database, address: SourceAddress) -> None:
    """The second call inspects again and still reports what it saw first."""
    results: list[object] = []

    def ensure(barrier: threading.Barrier, required: set[TableName]) -> None:
        barrier.wait()
        try:
            results.append(ensure_coverage(address, "pub", required, manage=True).blockers)
        except Exception as error:  # noqa: BLE001  # told by the assertion below
            results.append(error)

    for _ in range(5):
        barrier = threading.Barrier(3)
        threads = [
            threading.Thread(target=ensure, args=(barrier, required))
            for required in ({ORDERS}, {ORDERS, ITEMS}, {ITEMS})
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert shop.query("SELECT count(*) FROM pg_publication_tables") == [(2,)]
        shop.execute("DROP PUBLICATION pub")
    assert results == [()] * 15
