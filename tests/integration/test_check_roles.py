"""`penstock check` names what a role may not do, with statements that grant it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipeline.checks.findings import StepState
from penstock.postgres.publication import install_statements
from tests.support.fix_check import Checker
from tests.support.fix_postgres import Database
from tests.support.fix_roles import Roles


def _as(database: Database, role: str) -> dict[str, str]:
    return {"dsn": database.dsn.replace("postgres@", f"{role}@")}


@pytest.mark.versions(14, 18)
def test_C04_a_plain_role_gets_all_errors_at_once_and_the_fixes_work(
    shop: Database, roles: Roles, check: Checker
) -> None:
    plain = roles.create("plain")
    shop.execute(f"ALTER TABLE items ENABLE ROW LEVEL SECURITY; GRANT SELECT ON items TO {plain}")
    shop.execute(f"GRANT SELECT (id) ON orders TO {plain}; GRANT SELECT ON parted TO {plain}")
    report = check(source=_as(shop, plain))
    assert report.exit_code == 3
    fixes = [finding.fix or "" for finding in report.problems]
    expected = (
        f'ALTER ROLE "{plain}" REPLICATION;',
        f'GRANT CREATE ON DATABASE "{shop.name}" TO "{plain}";',
        "as postgres: CREATE PUBLICATION",
        f'GRANT SELECT ON "public"."orders" TO "{plain}";',
        f'GRANT SELECT ON "public"."part" TO "{plain}";',
        f'ALTER ROLE "{plain}" BYPASSRLS;',
    )
    assert [part for part in expected if not any(fix.startswith(part) for fix in fixes)] == []
    for fix in fixes:
        shop.execute(fix.rpartition("as postgres: ")[2])
    assert check(source=_as(shop, plain)).problems == []


def test_error_for_a_role_that_may_not_write_to_a_postgres_target_names_the_grants(
    shop: Database, roles: Roles, check: Checker
) -> None:
    loader = roles.create("loader")
    shop.execute(f"CREATE SCHEMA copy_public; REVOKE TEMPORARY ON DATABASE {shop.name} FROM public")
    sink = {"postgres": {**_as(shop, loader), "schema_prefix": "copy_"}}
    fixes = [finding.fix or "" for finding in check(sink=sink).problems if finding.step == "continuity"]
    assert fixes == [
        f'GRANT TEMPORARY ON DATABASE "{shop.name}" TO "{loader}";',
        f'GRANT USAGE, CREATE ON SCHEMA "copy_public" TO "{loader}";',
        f'GRANT CREATE ON DATABASE "{shop.name}" TO "{loader}";',
    ]
    for fix in fixes:
        shop.execute(fix)
    assert check(sink=sink).problems == []


def test_C04_a_role_subject_to_policies_never_reads_a_part_of_a_table(
    shop: Database, roles: Roles, check: Checker
) -> None:
    """The catalog shows it at the start; the session's own setting shows a policy added later."""
    from penstock.errors import PrivilegeError
    from penstock.postgres.connection import connect

    plain = roles.create("plain")
    shop.execute(f"CREATE POLICY few ON orders USING (id > 5); GRANT SELECT ON orders TO {plain}")
    shop.execute("ALTER TABLE orders ENABLE ROW LEVEL SECURITY")
    with pytest.raises(PrivilegeError) as caught, connect(roles.address(plain)) as connection:
        connection.execute("SELECT id FROM public.orders")
    assert "BYPASSRLS" in (caught.value.hint or "")


def test_C04_error_for_a_role_that_may_not_connect_names_the_grants(
    shop: Database, roles: Roles, check: Checker
) -> None:
    plain = roles.create("replication_user")
    shop.execute(f'REVOKE CONNECT ON DATABASE "{shop.name}" FROM PUBLIC')
    problem = check(source=_as(shop, plain)).problems[0]
    assert (problem.code, problem.fix) == (
        "PEN-1104",
        f'GRANT CONNECT ON DATABASE "{shop.name}" TO "{plain}";',
    )


def test_C04_services_name_their_own_roles(shop: Database, roles: Roles, check: Checker) -> None:
    plain = roles.create("plain")
    shop.execute("CREATE ROLE rds_replication")
    try:
        fixes = {finding.fix for finding in check(source=_as(shop, plain)).problems}
        assert f'GRANT rds_replication TO "{plain}";' in fixes
    finally:
        shop.execute("DROP ROLE rds_replication")


@pytest.mark.versions(14, 18)
def test_C09_a_read_only_role_may_run_once_an_administrator_made_the_publication(
    shop: Database, roles: Roles, check: Checker
) -> None:
    reader = roles.create("reader", "REPLICATION IN ROLE pg_read_all_data")
    shop.execute(f"ALTER ROLE {reader} SET default_transaction_read_only = on")
    source = {**_as(shop, reader), "publication": "made"}
    assert "PEN-1106" in {finding.code for finding in check(source=source).problems}
    shop.execute("CREATE PUBLICATION made FOR ALL TABLES WITH (publish_via_partition_root = true)")
    assert check(source=source).problems == []


def test_a_catalog_table_that_may_not_be_read_stops_one_step_only(
    shop: Database, roles: Roles, check: Checker
) -> None:
    reader = roles.create("reader", "REPLICATION")
    shop.execute("REVOKE SELECT ON pg_publication_rel FROM PUBLIC")
    report = check(source=_as(shop, reader))
    assert report.exit_code == 3
    assert "pg_publication_rel" in " ".join(finding.what for finding in report.problems)
    assert {step.name: step.state for step in report.steps}["replication"] is StepState.OK


def test_S03_the_event_trigger_is_tried_and_printed_for_who_may_create_it(
    shop: Database, roles: Roles, check: Checker
) -> None:
    plain = roles.create("plain", "REPLICATION")
    report = check(source={**_as(shop, plain), "event_trigger": True})
    (warning,) = [finding for finding in report.warnings if finding.code == "no-event-trigger"]
    assert (warning.step, warning.fix) == ("publication", install_statements())
    assert not [
        finding
        for finding in check(source={"dsn": shop.dsn, "event_trigger": True}).warnings
        if finding.code == warning.code
    ]
    assert shop.query("SELECT count(*) FROM pg_event_trigger") == [(0,)], "nothing is left behind"


def test_C04_a_schema_that_may_not_be_used_is_named_once_and_grants_on_columns_are_not_enough(
    shop: Database, roles: Roles, check: Checker
) -> None:
    plain = roles.create("plain", "REPLICATION")
    shop.execute(
        "CREATE SCHEMA shut; CREATE TABLE shut.a (id int PRIMARY KEY); "
        "CREATE TABLE shut.b (id int PRIMARY KEY)"
    )
    shop.execute(f"GRANT SELECT ON shut.a TO {plain}; GRANT SELECT (id, v) ON orders TO {plain}")
    report = check(source=_as(shop, plain), tables=["shut.*", "public.orders"])
    fixes = [finding.fix or "" for finding in report.problems]
    assert fixes.count(f'GRANT USAGE ON SCHEMA "shut" TO "{plain}";') == 1
    assert f'GRANT SELECT ON "public"."orders" TO "{plain}";' in fixes
    for fix in fixes:
        shop.execute(fix.rpartition("as postgres: ")[2])
    assert check(source=_as(shop, plain), tables=["shut.*", "public.orders"]).problems == []


def test_functions_of_others_that_would_run_as_the_capture_role_are_warnings(
    shop: Database, roles: Roles, check: Checker
) -> None:
    owner, reader = roles.create("owner"), roles.create("reader", "REPLICATION")
    assert not {"superuser-reads-tables-of-others", "functions-of-others"} & {
        finding.code for finding in check().warnings
    }
    shop.execute(
        "CREATE FUNCTION odd(int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT $1'; "
        "CREATE INDEX ON parted (odd(id))"
    )
    shop.execute("ALTER TABLE items ADD CHECK (odd(id) > 0); CREATE INDEX ON orders (id) WHERE odd(id) > 0")
    assert "functions-of-others" not in {finding.code for finding in check().warnings}, (
        "they are a superuser's"
    )
    shop.execute(f"ALTER FUNCTION odd(int) OWNER TO {owner}; ALTER TABLE items OWNER TO {owner}")
    warnings = check().warnings
    (superuser,) = [finding for finding in warnings if finding.code == "superuser-reads-tables-of-others"]
    assert [table.name for table in superuser.tables] == ["items"]
    assert owner in superuser.what
    called = [finding for finding in warnings if finding.code == "functions-of-others"]
    assert sorted(table.name for finding in called for table in finding.tables) == [
        "items",
        "orders",
        "parted",
    ]
    assert all(f"odd(integer) of {owner}" in finding.what for finding in called)
    shop.execute(
        f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {reader}; ALTER FUNCTION odd(int) OWNER TO {reader}"
    )
    codes = {finding.code for finding in check(source=_as(shop, reader)).warnings}
    assert not {"superuser-reads-tables-of-others", "functions-of-others"} & codes


def test_the_least_role_that_the_security_page_names_is_enough(
    shop: Database, roles: Roles, check: Checker
) -> None:
    page = (Path(__file__).parents[2] / "SECURITY.md").read_text(encoding="utf-8")
    statements = page.partition("```sql\n")[2].partition("```")[0]
    create, rest = statements.split(";", 1)
    options = create.partition("CREATE ROLE penstock LOGIN")[2]
    role = roles.create("least", options)
    shop.execute(
        "CREATE SCHEMA sales; CREATE TABLE sales.orders (id int PRIMARY KEY); "
        "CREATE TABLE sales.items (id int PRIMARY KEY)"
    )
    shop.execute(rest.replace("TO penstock", f"TO {role}").replace("DATABASE shop", f"DATABASE {shop.name}"))
    report = check(source={**_as(shop, role), "publication": "penstock_shop"}, tables=["sales.*"])
    assert report.problems == []
