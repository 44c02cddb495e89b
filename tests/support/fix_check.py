"""A small shop, and `penstock check` on it: source and disk are unchanged afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.pipeline.checks.check import check_pipeline
from penstock.pipeline.checks.findings import CheckReport
from tests.support.fix_postgres import Database

CATALOG = """
SELECT (SELECT jsonb_agg(to_jsonb(p) ORDER BY p.oid) FROM pg_publication p),
       (SELECT jsonb_agg(to_jsonb(p) ORDER BY p.oid) FROM pg_publication_rel p),
       (SELECT jsonb_agg(s.slot_name ORDER BY s.slot_name)
         FROM pg_replication_slots s WHERE s.database = current_database()),
       (SELECT count(*) FROM pg_class), (SELECT count(*) FROM pg_roles)
"""

Checker = Callable[..., CheckReport]


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, v text); INSERT INTO orders VALUES (1, 'secret row')"
    )
    database.execute(
        "CREATE TABLE items (id int PRIMARY KEY); "
        "CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)"
    )
    database.execute("CREATE TABLE part PARTITION OF parted FOR VALUES FROM (0) TO (10)")
    return database


def write_config(database: Database, directory: Path, changes: dict[str, Any]) -> Path:
    document = {
        "pipeline": f"check_{database.name.rsplit('_', 1)[-1]}",
        "source": {"dsn": database.dsn},
        "tables": ["public.*"],
        "sink": {"delta": {"path": "lake"}},
        **changes,
    }
    path = directory / "pipeline.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


@pytest.fixture
def check(shop: Database, tmp_path: Path) -> Checker:
    """`check()` with parts of the configuration replaced. Source and disk stay unchanged."""

    def run(**changes: Any) -> CheckReport:
        path = write_config(shop, tmp_path, changes)
        before, files = shop.query(CATALOG), sorted(tmp_path.rglob("*"))
        report = check_pipeline(path)
        assert shop.query(CATALOG) == before
        assert sorted(tmp_path.rglob("*")) == files
        return report

    return run
