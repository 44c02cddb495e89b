"""Snapshots of several tables routed into one: one fence for all, however often the copy is interrupted."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.errors import MembersDifferError
from penstock.schema import TableName
from tests.support.snapshot.copying import Copying, Watcher
from tests.support.snapshot.tables import WIDE

INTO = TableName("lake", "shards")


def make(copying: Copying, *tables: str) -> None:
    """The same keys in all of them; one has its columns in another order, one is partitioned."""
    kinds = [
        "(id int PRIMARY KEY, v text)",
        "(v text, id int PRIMARY KEY)",
        "(id int PRIMARY KEY, v text) PARTITION BY HASH (id)",
    ]
    for at, table in enumerate(tables):
        copying.captured.execute(f"CREATE TABLE {table} {kinds[at % 3]}")
        if at % 3 == 2:
            for part in range(2):
                copying.captured.execute(
                    f"CREATE TABLE {table}_{part} PARTITION OF {table} FOR "
                    f"VALUES WITH (MODULUS 2, REMAINDER {part})"
                )
        copying.captured.execute(
            f"INSERT INTO {table} (id, v) SELECT g, '{table}' || {WIDE} FROM generate_series(1, 60) g"
        )
    copying.captured.start()


def edit(copying: Copying, table: str) -> None:
    copying.captured.execute(
        f"UPDATE {table} SET v = 'changed in {table}' WHERE id % 7 = 0",
        f"DELETE FROM {table} WHERE id % 11 = 0",
        f"UPDATE {table} SET id = id + 1000 WHERE id % 13 = 0 AND id < 1000",
        f"INSERT INTO {table} (id, v) SELECT g, {WIDE} FROM generate_series(5000, 5010) g ON CONFLICT "
        "DO NOTHING",
    )


def test_K11_a_snapshot_of_shards_has_one_fence_under_writes(copying: Copying) -> None:
    tables = ("one_a", "one_b", "one_c")
    make(copying, *tables)
    watcher = Watcher()
    watcher.after_chunk = lambda read: edit(copying, tables[read % 3])
    assert copying.run(*tables, into=INTO, watcher=watcher)[1] == {}
    assert len(copying.held) == 1
    copying.assert_joined(INTO, *tables)


def test_K11_N03_a_snapshot_of_shards_resumes_where_it_was_interrupted(copying: Copying) -> None:
    """Each member is read by its own keys, which other members have too."""
    tables = ("more_a", "more_b", "more_c")
    make(copying, *tables)
    copying.run(*tables, into=INTO, chunks=4)
    for table in tables[1:]:
        edit(copying, table)
    watcher, failures = copying.run(*tables, into=INTO)
    done, chunks = watcher.resumed[INTO]
    assert not failures
    assert 4 <= done < chunks
    assert len(watcher.read) == chunks - done, "finished chunks are not read again"
    assert len(copying.held) == 2
    copying.assert_joined(INTO, *tables)


def test_a_shard_truncated_or_altered_between_fences_restarts_all_shards(copying: Copying) -> None:
    tables = ("again_a", "again_b")
    make(copying, *tables)
    copying.run(*tables, into=INTO, chunks=3)
    copying.captured.execute("TRUNCATE again_b", "INSERT INTO again_b (id, v) VALUES (1, 'after')")
    watcher, failures = copying.run(*tables, into=INTO, chunks=2)
    assert not failures
    assert INTO not in watcher.resumed
    copying.captured.execute("ALTER TABLE again_a ADD more int", "ALTER TABLE again_b ADD more int")
    copying.run(*tables, into=INTO)
    copying.assert_joined(INTO, *tables)


def test_shards_that_differ_when_they_are_to_be_read_are_refused(copying: Copying) -> None:
    make(copying, "odd_a", "odd_b")
    copying.captured.execute("ALTER TABLE odd_b ADD more int")
    _, failures = copying.run("odd_a", "odd_b", into=INTO)
    assert isinstance(failures[INTO], MembersDifferError)
    assert "public.odd_b has a column 'more'" in failures[INTO].message


def test_an_interrupted_copy_resumes_with_the_statements_of_the_catalog_and_not_with_those_stored(
    copying: Copying, tmp_path: Path
) -> None:
    tables = ("kept_a", "kept_b")
    make(copying, *tables)
    copying.run(*tables, into=INTO, chunks=2)
    edit(copying, "kept_b")
    (plan,) = tmp_path.rglob("plan.json")
    document = json.loads(plan.read_bytes())
    for member in document["members"]:
        member["row_filter"] = "false"
        member["key_types"] = ["text); SELECT 1 / 0; --"]
    plan.write_text(json.dumps(document), encoding="utf-8")
    watcher, failures = copying.run(*tables, into=INTO)
    assert not failures
    assert INTO in watcher.resumed
    copying.assert_joined(INTO, *tables)
