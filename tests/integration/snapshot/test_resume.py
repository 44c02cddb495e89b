"""An interrupted snapshot resumes, reads no finished chunk again, and is exact at its last fence."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipeline.snapshots.state import SnapshotStore, load_all_progress, load_progress
from penstock.schema import TableName
from tests.support.fix_captured import capturing
from tests.support.fix_postgres import PostgresServer
from tests.support.snapshot.copying import PIPELINE, Copying, Watcher
from tests.support.snapshot.local import FileSink, LocalExecutors
from tests.support.snapshot.tables import KEYS, WIDE, change, make

SPARK_KEYS = f"""
SELECT g, 'it''s "' || g, CASE WHEN g % 5 = 0 THEN 'NaN' ELSE g / 100.0 END,
    CASE WHEN g % 4 = 0 THEN 'infinity'
      ELSE timestamptz '1500-02-28 23:59:59.123456+00' + g * interval '1 year' END,
    decode(lpad(to_hex(g), 4, '0'), 'hex'), date '0001-01-01' + g, md5(g::text)::uuid, 'so so'::spark_mood,
      g / 3.0, {WIDE}
"""


def test_N03_a_snapshot_resumes_where_it_was_interrupted(copying: Copying) -> None:
    name = make(copying, "n03")
    first, _ = copying.run("n03", chunks=4)
    change(copying, "n03")
    second, failures = copying.run("n03")
    done, chunks = second.resumed[name]
    assert not failures
    assert 4 <= done < chunks
    assert len(first.read) == done
    assert len(second.read) == chunks - done, "finished chunks are not read again"
    copying.assert_exact("n03")


def test_N03_on_spark_and_delta_a_snapshot_resumes_where_it_was_interrupted(
    copying_on_spark: Copying,
) -> None:
    """Keys of every type in the same tables, so that Spark writes each as text for the source."""
    copying, captured = copying_on_spark, copying_on_spark.captured
    captured.execute("CREATE TYPE spark_mood AS ENUM ('so so', 'fine')")
    declared = "id int, t text, n numeric, z timestamptz, b bytea, d date, u uuid, m spark_mood, f float8"
    captured.execute(
        f"CREATE TABLE spark_keys ({declared}, v text, PRIMARY KEY (id, t, n, z, b, d, u, m, f))"
    )
    captured.execute(f"INSERT INTO spark_keys {SPARK_KEYS} FROM generate_series(1, 40) g")
    captured.start()
    copying.run("spark_keys", chunks=1)
    captured.execute(
        "UPDATE spark_keys SET v = 'changed' WHERE id % 3 = 0",
        "DELETE FROM spark_keys WHERE id % 7 = 0",
        "UPDATE spark_keys SET n = n + 1, b = b || b WHERE id % 5 = 1",
        "INSERT INTO spark_keys SELECT g, '', g, '0044-03-15 BC', '', '0044-03-15 BC', md5('')::uuid, "
        "'fine', 'NaN', 'new' "
        "FROM generate_series(100, 105) g",
    )
    watcher, failures = copying.run("spark_keys")
    assert not failures
    done, chunks = watcher.resumed[TableName("public", "spark_keys")]
    assert len(watcher.read) == chunks - done
    copying.assert_exact("spark_keys")


def test_N03_a_snapshot_is_interrupted_again_and_again(copying: Copying) -> None:
    name = make(copying, "again")
    read = 0
    for _ in range(4):
        watcher, _ = copying.run("again", chunks=1)
        read += len(watcher.read)
        change(copying, "again")
    watcher, _ = copying.run("again")
    done, chunks = watcher.resumed[name]
    assert (done, len(watcher.read)) == (read, chunks - read)
    copying.assert_exact("again")


def test_N04_a_crash_after_the_last_chunk_reads_nothing_again(
    copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(copying, "n04")

    def crash(*_: object) -> None:
        raise _CrashError

    with monkeypatch.context() as patch:
        patch.setattr(FileSink, "finish_snapshot", crash)
        with pytest.raises(_CrashError):
            copying.run("n04")
    change(copying, "n04")
    watcher, _ = copying.run("n04")
    assert watcher.read == [], "all chunks are exact at one fence, and the table is committed there"
    copying.assert_exact("n04")
    with monkeypatch.context() as patch:
        patch.setattr(SnapshotStore, "forget", crash)
        again, _ = copying.run("n04")
    assert again.planned == [], "rows in the target are not copied again"


def test_N04_a_crash_before_the_repair_is_committed_repairs_again(
    copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(copying, "repaired")
    copying.run("repaired", chunks=3)
    change(copying, "repaired")

    def crash(*_: object) -> None:
        raise _CrashError

    with monkeypatch.context() as patch:
        patch.setattr(FileSink, "repair_snapshot", crash)
        with pytest.raises(_CrashError):
            copying.run("repaired")
    copying.captured.execute("UPDATE repaired SET v = 'later' WHERE id % 5 = 0")
    watcher, _ = copying.run("repaired")
    assert watcher.read == []
    copying.assert_exact("repaired")


def test_N05_tables_with_keys_of_every_kind_are_copied_and_resumed(copying: Copying) -> None:
    captured = copying.captured
    captured.execute(
        "CREATE TYPE mood AS ENUM ('so so', 'fine'); CREATE TYPE pair AS (a int, b text); "
        "CREATE DOMAIN code AS char(2)"
    )
    names = [
        f"n05_{name}" for name, (type_name, _, _) in KEYS.items() if type_name != "bytea"
    ]  # Arrow does not write bytes as text
    for name in names:
        type_name, values, _ = KEYS[name.removeprefix("n05_")]
        rows = ", ".join(f"({value}, {number}, {number})" for number, value in enumerate(values))
        captured.execute(
            f"CREATE TABLE {name} (k {type_name}, i int, n int, v text, PRIMARY KEY (k, i)); "
            f"INSERT INTO {name} VALUES {rows}"
        )
        captured.execute(
            f"INSERT INTO {name} SELECT k, g, g, {WIDE} FROM {name}, generate_series(100, 120) g WHERE n < 1"
        )
    captured.start()
    copying.run(*names, chunks=len(names))
    for name in names:
        captured.execute(
            f"UPDATE {name} SET v = 'changed' WHERE n % 3 = 0; DELETE FROM {name} WHERE n = 1 OR n = 105"
        )
    watcher, failures = copying.run(*names)
    assert failures == {}
    assert watcher.resumed
    assert not [trouble for trouble in watcher.troubles if "starts again" in trouble]
    copying.assert_exact(*names)


def test_N05_keys_that_the_server_considers_equal_are_distinguished(copying: Copying) -> None:
    """A day and 24 hours are two keys in the target, and one key in the source."""
    captured = copying.captured
    captured.execute("CREATE TABLE alike (k interval PRIMARY KEY, v text)")
    captured.execute(
        f"INSERT INTO alike SELECT make_interval(days => g), {WIDE} FROM generate_series(1, 40) g"
    )
    captured.start()
    copying.run("alike", chunks=2)
    captured.execute(
        "UPDATE alike SET k = justify_interval(k) - k + make_interval(hours => 24) * extract(day FROM k) "
        "WHERE k < '25 days'"
    )
    captured.execute("UPDATE alike SET k = justify_hours(k) WHERE k < '5 days'")
    watcher, _ = copying.run("alike")
    assert watcher.resumed
    copying.assert_exact("alike")
    assert {len(str(row["k"])) for row in copying.rows(TableName("public", "alike"))} > {3}, (
        "some of them have another text now"
    )


def test_N05_empty_tables_and_single_rows_are_copied(copying: Copying) -> None:
    captured = copying.captured
    captured.execute(
        "CREATE TABLE nothing (id int PRIMARY KEY); CREATE TABLE one (id int PRIMARY KEY); "
        "INSERT INTO one VALUES (-1)"
    )
    captured.execute("CREATE TABLE no_leaves (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    assert copying.run("nothing", "one", "no_leaves")[1] == {}
    copying.assert_exact("nothing", "one", "no_leaves")


def test_N06_a_table_without_key_is_copied_and_restarted_when_interrupted(copying: Copying) -> None:
    captured = copying.captured
    captured.execute(
        "CREATE TABLE keyless (id int, v text); "
        f"INSERT INTO keyless SELECT g, {WIDE} FROM generate_series(1, 60) g"
    )
    captured.execute("ALTER TABLE keyless REPLICA IDENTITY FULL")
    captured.start()
    copying.run("keyless", chunks=2)
    captured.execute("UPDATE keyless SET v = 'changed' WHERE id % 3 = 0")
    watcher, failures = copying.run("keyless")
    assert not failures
    assert watcher.resumed == {}
    assert any("its rows cannot be read by key" in trouble for trouble in watcher.troubles)
    copying.assert_exact("keyless")


def test_N07_any_name_keeps_its_place(copying: Copying) -> None:
    captured, names = copying.captured, ['Mixed "Case".x', "mixed/case", "..", "per%cent ~"]
    for name in names:
        quoted = name.replace('"', '""')
        captured.execute(f'CREATE TABLE "{quoted}" ("The Id" int PRIMARY KEY, "a.b" text)')
        captured.execute(f'INSERT INTO "{quoted}" SELECT g, {WIDE} FROM generate_series(1, 30) g')
    captured.start()
    copying.run(*names, chunks=2)
    assert {table.name for table in copying.store.tables()} <= set(names)
    captured.execute("""UPDATE "Mixed ""Case"".x" SET "a.b" = 'x' WHERE "The Id" % 2 = 0""")
    copying.run(*names)
    copying.assert_exact(*names)


def test_N09_rows_that_enter_and_leave_the_filter_are_repaired(
    postgres_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with capturing(postgres_server, tmp_path / "spool") as captured:
        captured.execute(
            "CREATE TABLE f (id int PRIMARY KEY, region text NOT NULL, secret text, v text); "
            "CREATE UNIQUE INDEX f_key ON f (id, region)",
            "ALTER TABLE f REPLICA IDENTITY USING INDEX f_key; DROP PUBLICATION p",
            f"SELECT pg_drop_replication_slot('{captured.slot}')",
            "CREATE PUBLICATION p FOR TABLE f (id, region, v) WHERE (region = 'EU')",
            f"SELECT pg_create_logical_replication_slot('{captured.slot}', 'pgoutput')",
            f"INSERT INTO f SELECT g, CASE WHEN g % 2 = 0 THEN 'EU' ELSE 'US' END, 's', {WIDE} "
            "FROM generate_series(1, 80) g",
        )
        captured.start()
        sink = FileSink(tmp_path / "lake")
        copying = Copying(captured, tmp_path / "lake", executors=LocalExecutors(), sink=sink, rows=sink.rows)
        copying.run("f", chunks=3)
        captured.execute(
            "UPDATE f SET region = 'EU' WHERE id % 5 = 0", "UPDATE f SET region = 'US' WHERE id % 4 = 0"
        )
        captured.execute("UPDATE f SET secret = 'x'")
        watcher, failures = copying.run("f")
        assert not failures
        assert watcher.resumed
        rows = sink.rows(TableName("public", "f"))
        assert sorted((row["id"], row["region"]) for row in rows) == captured.query(
            "SELECT id, region FROM f WHERE region = 'EU' ORDER BY id"
        )
        assert list(rows[0]) == ["id", "region", "v", "_exact"]


def test_N12_the_source_is_never_written_to(copying: Copying) -> None:
    """No watermark table is needed: even an interrupted and repaired snapshot works with a
    read-only source.
    """
    name = make(copying, "n12")
    database = copying.captured.database.name
    copying.captured.execute(f'ALTER DATABASE "{database}" SET default_transaction_read_only = on')
    try:
        copying.run("n12", chunks=4)
        change(copying, "n12")
        _, failures = copying.run("n12")
    finally:
        copying.captured.execute(f'ALTER DATABASE "{database}" RESET default_transaction_read_only')
    assert not failures
    assert copying.fences[name] in copying.held
    assert len(copying.held) == 2
    copying.assert_exact("n12")


def test_N15_rows_moved_between_leaves_are_written_once(copying: Copying) -> None:
    captured = copying.captured
    captured.execute(
        "CREATE TABLE root (id int, part int, v text, PRIMARY KEY (id, part)) PARTITION BY LIST (part)"
    )
    captured.execute(
        "CREATE TABLE leaf1 PARTITION OF root FOR VALUES IN (1); "
        "CREATE TABLE leaf2 PARTITION OF root FOR VALUES IN (2)"
    )
    captured.execute(f"INSERT INTO root SELECT g, 1 + g % 2, {WIDE} FROM generate_series(1, 120) g")
    captured.start()
    copying.run("root", chunks=4)
    captured.execute("UPDATE root SET part = 3 - part WHERE id % 3 = 0", "DELETE FROM root WHERE id % 10 = 0")
    watcher, failures = copying.run("root")
    assert not failures
    assert watcher.resumed
    copying.assert_exact("root")


def test_progress_is_reported_and_readable_by_other_processes(copying: Copying, tmp_path: Path) -> None:
    name = make(copying, "progress")
    watcher, _ = copying.run("progress", chunks=3)
    found = load_progress(tmp_path / "lake", PIPELINE, name)
    assert found is not None
    assert watcher.progress is not None
    assert (found.chunks_done, found.chunks_total) == (len(watcher.read), watcher.progress.chunks_total)
    assert 0 < found.rows < 120
    assert 0 < found.heap_bytes_done < found.heap_bytes_total
    assert found.fence == copying.fences[name]
    assert found.seconds_left is not None
    assert load_all_progress(tmp_path / "lake", PIPELINE) == {name: found}
    assert found.as_document()["chunks_done"] == found.chunks_done
    copying.run("progress", watcher=Watcher())
    assert load_progress(tmp_path / "lake", PIPELINE, name) is None


class _CrashError(BaseException):
    pass
