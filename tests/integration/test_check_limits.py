"""`penstock check` with very many tables. PENSTOCK_TEST_TABLES sets the number; 10,000 take half a minute."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from penstock.pipeline.checks.check import check_pipeline
from tests.support.fix_pipeline import mirror_document
from tests.support.fix_postgres import Database

TABLES = int(os.environ.get("PENSTOCK_TEST_TABLES", "200"))
_AT_ONCE = 500


def test_K14_many_tables_the_widest_and_names_that_spark_considers_equal_are_all_checked(
    database: Database, tmp_path: Path
) -> None:
    made = (
        "DO $$ BEGIN FOR n IN {}..{} LOOP EXECUTE format('CREATE TABLE t%s (id int PRIMARY KEY)', n); "
        "END LOOP; END $$"
    )
    for first in range(0, TABLES, _AT_ONCE):
        database.execute(made.format(first, min(first + _AT_ONCE, TABLES) - 1))
    database.execute(
        f"CREATE TABLE wide (id int PRIMARY KEY, {', '.join(f'c{number} int' for number in range(1599))})"
    )
    database.execute('CREATE TABLE "select" ("from" int PRIMARY KEY, "where" text)')
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump(mirror_document(database)), encoding="utf-8")
    report = check_pipeline(path)
    assert report.problems == []
    assert {step.name: step.detail for step in report.steps}["tables"] == f"{TABLES + 2:,} selected"
    database.execute('CREATE TABLE cased (id int PRIMARY KEY, a int, "A" int)')
    assert [finding.code for finding in check_pipeline(path).problems] == ["PEN-1404"]
