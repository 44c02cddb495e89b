"""`penstock check` with `capture: trigger`: it needs no slot and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import yaml

from penstock.pipeline.checks.check import check_pipeline
from penstock.pipeline.checks.findings import CheckReport, StepState
from penstock.postgres.capture_triggers import Installation
from penstock.postgres.connection import connect
from tests.support.fix_postgres import Database
from tests.support.fix_roles import Roles

NAME = "noted_changes"
CATALOG = (
    "SELECT (SELECT count(*) FROM pg_class), (SELECT count(*) FROM pg_trigger), (SELECT count(*) "
    "FROM pg_namespace)"
)


def check(database: Database, directory: Path, dsn: str | None = None) -> CheckReport:
    document = {
        "pipeline": "check_triggers",
        "source": {"dsn": dsn or database.dsn, "capture": "trigger", "slot": NAME},
        "tables": ["public.*"],
        "sink": {"delta": {"path": "lake"}},
    }
    path = directory / "pipeline.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    before = database.query(CATALOG)
    report = check_pipeline(path)
    assert database.query(CATALOG) == before
    return report


def test_a_source_that_can_have_triggers_has_no_problem_and_keeps_no_trace(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    report = check(database, tmp_path)
    assert report.problems == []
    triggers = next(step for step in report.steps if step.name == "triggers")
    assert (triggers.state, triggers.detail) == (StepState.OK, f"{NAME}: 1 tables may get their triggers")
    assert "slot" not in {step.name for step in report.steps}


def test_statements_for_an_unprivileged_role_work(database: Database, roles: Roles, tmp_path: Path) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    plain = roles.create("plain")
    database.execute(f"GRANT SELECT ON orders TO {plain}")
    dsn = database.dsn.replace("postgres@", f"{plain}@")
    report = check(database, tmp_path, dsn)
    fixes = [finding.fix or "" for finding in report.problems]
    assert [finding.code for finding in report.problems] == ["PEN-1104", "PEN-1104"]
    database.execute(fixes[-1].partition(": ")[2])
    assert check(database, tmp_path, dsn).problems == []


def test_statements_for_a_table_owner_work_with_a_foreign_change_table(
    database: Database, roles: Roles, tmp_path: Path
) -> None:
    owner, plain = roles.create("owner"), roles.create("plain")
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    database.execute(f"ALTER TABLE orders OWNER TO {owner}; GRANT SELECT ON orders TO {plain}")
    database.execute(f"GRANT CREATE ON DATABASE {database.name} TO {plain}")
    dsn = database.dsn.replace("postgres@", f"{plain}@")
    with connect(roles.address(plain)) as session:
        Installation(NAME, plain, needs_table=True, tables=()).run(session)
    (finding,) = check(database, tmp_path, dsn).problems
    grants, drop, rest = (finding.fix or "").partition(": ")[2].partition("DROP TRIGGER")
    for role, statements in ((plain, grants), (owner, drop + rest)):
        with connect(roles.address(role)) as session:
            session.execute(statements.encode())
    assert check(database, tmp_path, dsn).problems == []
