"""Every mode, from a statement in Postgres to a row in Delta or Iceberg."""

from __future__ import annotations

import pytest

from tests.fix_pipeline import MirrorFactory
from tests.fix_postgres import Database

TABLES = [
    {"table": "public.kept", "mode": "soft_delete"},
    {"table": "public.versions", "mode": "history"},
    {"table": "public.changes", "mode": "append"},
    {"table": "public.images", "mode": "append"},
    {"table": "public.few", "mode": "append", "where": "size < 5"},
    "public.whole",
    "public.heap",
]


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_K15_K16_every_mode_holds_what_the_source_had_and_has(database: Database, mirror_into: MirrorFactory, kind: str) -> None:
    for table in ("kept", "versions", "changes"):
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, size int, long text)")
        database.execute(f"ALTER TABLE {table} ALTER long SET STORAGE EXTERNAL")
        database.execute(f"INSERT INTO {table} SELECT n, 0, repeat(n::text, 4000) FROM generate_series(1, 5) n")
    database.execute("CREATE TABLE heap (a int, b numeric)")
    database.execute("ALTER TABLE heap REPLICA IDENTITY FULL")
    database.execute("INSERT INTO heap SELECT 1, 'NaN' FROM generate_series(1, 4)")
    for table in ("images", "few", "whole"):
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, size int)")
        database.execute(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
        database.execute(f"INSERT INTO {table} SELECT n, 0 FROM generate_series(1, 3) n")
    modes = mirror_into(kind, tables=TABLES, source={"dsn": database.dsn, "old_rows": True})
    modes.run_once()
    for table in ("kept", "versions", "changes"):
        database.execute(f"UPDATE {table} SET size = 1 WHERE id = 1")
        database.execute(f"DELETE FROM {table} WHERE id = 2")
        database.execute(f"UPDATE {table} SET id = 30 WHERE id = 3")
        database.execute(f"INSERT INTO {table} VALUES (2, 7, 'again')")
        database.execute(f"DELETE FROM {table} WHERE id = 4")
    for table in ("images", "few", "whole"):
        database.execute(f"UPDATE {table} SET size = 7 WHERE id = 1")
        database.execute(f"UPDATE {table} SET size = 1 WHERE id = 1")
        database.execute(f"DELETE FROM {table} WHERE id = 2")
        database.execute(f"UPDATE {table} SET id = 30 WHERE id = 3")
    database.execute("DELETE FROM heap WHERE ctid IN (SELECT min(ctid) FROM heap)")
    database.execute("UPDATE heap SET a = 2 WHERE ctid IN (SELECT min(ctid) FROM heap)")
    database.execute("INSERT INTO heap VALUES (2, 'NaN'), (NULL, NULL)")
    modes.run_once()
    modes.assert_equal("public.heap", "public.kept", "public.versions", "public.whole")
    assert sorted(tuple(row) for row in modes.rows("public.kept", "id, size, length(long), _deleted, _deleted_at IS NOT NULL")) == [
        (1, 1, 4000, False, False),
        (2, 7, 5, False, False),
        (3, 0, 4000, True, True),
        (4, 0, 4000, True, True),
        (5, 0, 4000, False, False),
        (30, 0, 4000, False, False),
    ]
    versions = "id, size, length(long), _current, _valid_to IS NULL, _valid_to IS NULL OR _valid_from < _valid_to"
    assert sorted(tuple(row) for row in modes.rows("public.versions", versions)) == [
        (1, 0, 4000, False, False, True),
        (1, 1, 4000, True, True, True),
        (2, 0, 4000, False, False, True),
        (2, 7, 5, True, True, True),
        (3, 0, 4000, False, False, True),
        (4, 0, 4000, False, False, True),
        (5, 0, 4000, True, True, True),
        (30, 0, 4000, True, True, True),
    ]
    log = modes.rows("public.changes", "_commit_version, _ordinal, _change_type, id, _unchanged")
    assert [tuple(row)[2:] for row in sorted(log)] == [
        *(("snapshot", at, None) for at in range(1, 6)),
        ("update_postimage", 1, ["long"]),
        ("delete", 2, None),
        ("delete", 3, None),
        ("insert", 30, ["long"]),
        ("insert", 2, None),
        ("delete", 4, None),
    ]
    images = modes.rows("public.images", "_commit_version, _ordinal, _change_type, id, size")
    assert [tuple(row)[2:] for row in sorted(images)] == [
        *(("snapshot", at, 0) for at in range(1, 4)),
        *(("update_preimage", 1, 0), ("update_postimage", 1, 7)),
        *(("update_preimage", 1, 7), ("update_postimage", 1, 1)),
        ("delete", 2, 0),
        *(("delete", 3, 0), ("insert", 30, 0)),
    ]
    few = modes.rows("public.few", "_commit_version, _ordinal, _change_type, id, size")
    assert [tuple(row)[2:] for row in sorted(few)] == [
        *(("snapshot", at, 0) for at in range(1, 4)),
        *(("update_preimage", 1, 0), ("delete", 1, None)),
        ("update_postimage", 1, 1),
        ("delete", 2, 0),
        *(("delete", 3, 0), ("insert", 30, 0)),
    ]
