"""`penstock check` reports all problems at once and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from rich.console import Console

from penstock.cli.status import print_check
from penstock.config.model import load_config
from penstock.errors import TransformError
from penstock.pipeline.checks.check import check_pipeline
from penstock.pipeline.checks.findings import StepState
from penstock.pipeline.epoch_log import Epoch, EpochLog
from penstock.pipeline.sources.adapter import source_adapter
from penstock.pipeline.sources.resume_checks import save_memberships
from penstock.position import Position
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.membership import Membership
from penstock.postgres.server import identify_system
from penstock.postgres.slot import current_position
from penstock.schema import TableName
from penstock.sinks.delta.log import KEY, OWNER, SOURCE_OID, application_id, record_position
from tests.support.fix_check import Checker, write_config
from tests.support.fix_postgres import Database
from tests.support.waiting import wait_for


@pytest.mark.versions(14, 18)
def test_a_source_that_is_ready_has_no_problem_and_keeps_no_trace(check: Checker) -> None:
    report = check()
    assert report.problems == []
    assert report.exit_code == 0
    assert [step.name for step in report.steps][:5] == [
        "configuration",
        "connection",
        "server",
        "replication",
        "slot",
    ]
    assert not [step for step in report.steps if step.state is StepState.SKIPPED]
    assert "unbounded-wal" in {finding.code for finding in report.warnings}


def test_R18_relations_outside_the_log_are_named_with_the_reason(shop: Database, check: Checker) -> None:
    shop.execute(
        "CREATE VIEW seen AS SELECT 1 AS id; CREATE MATERIALIZED VIEW kept AS SELECT 1 AS id; "
        "CREATE UNLOGGED TABLE fast (id int)"
    )
    report = check(tables=["public.*", "public.seen", "public.gone"])
    assert report.exit_code == 2
    assert {finding.code: [str(table) for table in finding.tables] for finding in report.problems} == {
        "PEN-1404": ["public.seen"],
        "PEN-1401": ["public.gone"],
    }
    ignored = {
        str(table): finding.what
        for finding in report.warnings
        if finding.code == "ignored"
        for table in finding.tables
    }
    assert ignored.keys() == {"public.kept", "public.fast"}
    assert "unlogged" in ignored["public.fast"]


def test_tables_that_cannot_be_mirrored_are_all_named(shop: Database, check: Checker) -> None:
    shop.execute(
        'CREATE TABLE keyless (id int); CREATE TABLE columns (id int PRIMARY KEY, "ID" int); '
        'CREATE TABLE "Orders" (id int PRIMARY KEY)'
    )
    report = check()
    assert {(finding.code, str(finding.tables[0])) for finding in report.problems} == {
        ("PEN-1402", "public.keyless"),
        ("PEN-1404", "public.columns"),
    }
    assert [finding.tables for finding in report.warnings if finding.code == "case-twins"]


def test_P03_gaps_of_an_existing_publication_are_problems(shop: Database, check: Checker) -> None:
    shop.execute("CREATE PUBLICATION made FOR ALL TABLES WITH (publish = 'insert')")
    report = check(source={"dsn": shop.dsn, "publication": "made"})
    assert [finding.code for finding in report.problems] == ["PEN-1105", "PEN-1105"]
    for finding in report.problems:
        shop.execute(finding.fix or "")
    assert check(source={"dsn": shop.dsn, "publication": "made"}).problems == []


def test_a_slot_that_cannot_be_used_and_one_that_is_in_use(shop: Database, check: Checker) -> None:
    slot = f"physical_{shop.name}"
    shop.query("SELECT pg_create_physical_replication_slot(%s)", slot)
    try:
        report = check(source={"dsn": shop.dsn, "slot": slot})
        assert [finding.step for finding in report.problems] == ["slot"]
        assert "source.slot" in (report.problems[0].fix or "")
    finally:
        shop.query("SELECT pg_drop_replication_slot(%s)", slot)


def test_L08_who_reads_the_slot_is_named_with_the_statement_that_ends_it(
    shop: Database, check: Checker, lake: Lake
) -> None:
    with closing(
        psycopg.connect(shop.dsn, replication="database", autocommit=True, application_name="another tool")
    ) as reader:
        options = f"proto_version '1', publication_names '{lake.slot}'"
        reader.pgconn.send_query(f"START_REPLICATION SLOT {lake.slot} LOGICAL 0/0 ({options})".encode())
        active = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s AND active"
        wait_for(lambda: bool(shop.query(active, lake.slot)), "a taken slot", lambda: None)
        report = check()
        (warning,) = [finding for finding in report.warnings if finding.code == "slot-in-use"]
        pid = reader.info.backend_pid
        assert (report.exit_code, warning.step) == (0, "slot")
        assert warning.what.startswith(
            f"slot {lake.slot} is being read by server process {pid} (application 'another tool', client "
        )
        assert warning.what.endswith("): a run may be active")
        assert warning.fix == (
            "stop that reader; if it has ended and the server has not noticed yet: "
            f"SELECT pg_terminate_backend({pid})"
        )
        shop.query(warning.fix.partition(": ")[2])
        wait_for(lambda: not shop.query(active, lake.slot), "a free slot", lambda: None)
    assert "slot-in-use" not in {finding.code for finding in check().warnings}


@pytest.mark.parametrize("is_new", [True, False])
def test_R15_tables_that_have_one_place_because_they_differ_only_in_case_are_a_problem(
    shop: Database, check: Checker, tmp_path: Path, is_new: bool
) -> None:
    for schema in ("a", "A"):
        shop.execute(f'CREATE SCHEMA "{schema}"; CREATE TABLE "{schema}".t (id int PRIMARY KEY)')
    if not is_new:
        (tmp_path / "target").mkdir()
    sink = {"postgres": {"dsn": shop.dsn, "schemas": {"a": "copies", "A": "copies"}}}
    found = check(tables=["a.*", "A.*"], sink=sink).problems
    assert {(finding.step, finding.code, finding.fix, finding.tables) for finding in found} == {
        ("continuity", "PEN-1404", "rename or exclude all of them but one", (TableName(schema, "t"),))
        for schema in ("a", "A")
    }
    assert all("differ only in case, and " in finding.what for finding in found)


def test_an_open_transaction_that_holds_up_the_slot_is_named_instead_of_waited_for(
    shop: Database, check: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.checks.check.PATIENCE_WAITS", 1)
    with shop.connect() as holder:
        holder.execute("INSERT INTO items VALUES (1)")
        report = check()
        assert [(finding.step, finding.code) for finding in report.problems] == [("slot", "PEN-1107")]
        assert report.problems[0].fix == f"SELECT pg_terminate_backend({holder.info.backend_pid});"


def test_a_prepared_transaction_is_ended_by_the_statement_that_is_named(
    shop: Database, check: Checker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.pipeline.checks.check.PATIENCE_WAITS", 1)
    with shop.connect() as holder:
        holder.execute("INSERT INTO items VALUES (1)")
        holder.execute("PREPARE TRANSACTION 'it''s'")
    try:
        report = check()
    finally:
        shop.execute("ROLLBACK PREPARED 'it''s'")
    assert report.problems[0].fix == "ROLLBACK PREPARED 'it''s';"
    assert [
        record.getMessage() for record in caplog.records if "ignored in rollback" in record.getMessage()
    ] == []


# --- what earlier runs have left ----------------------------------------------------------------------------


class Lake:
    """The table `orders` as an earlier run left it, with its slot and the record of its epoch."""

    def __init__(self, database: Database, directory: Path) -> None:
        import pyarrow as pa
        from deltalake import write_deltalake

        self.pipeline = f"check_{database.name.rsplit('_', 1)[-1]}"
        self.slot = f"penstock_{self.pipeline}"
        self._database = database
        database.execute(
            f"CREATE PUBLICATION {self.slot} FOR ALL TABLES WITH (publish_via_partition_root = true)"
        )
        database.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", self.slot)
        with database.connect() as connection:
            self.position = current_position(connection)
        root, oid = directory / "lake", database.query("SELECT 'orders'::regclass::oid")[0][0]
        properties = {OWNER: self.pipeline, KEY: '["id"]', SOURCE_OID: str(oid)}
        rows = pa.table(
            {
                "id": pa.array([1], pa.int32()),
                "v": ["a"],
                "_exact": pa.array([None], pa.map_(pa.string(), pa.string())),
            }
        )
        write_deltalake(str(root / "public" / "orders"), rows)
        _set_properties(root / "public" / "orders", properties)
        name = TableName("public", "orders")
        record_position(root / "public" / "orders", application_id(self.pipeline, name), self.position)
        EpochLog(root, self.pipeline).record(
            Epoch(1, self.position, None, str(identify_system(SourceAddress.parse(database.dsn))))
        )

    def drop_slot(self) -> None:
        self._database.query(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s",
            self.slot,
        )


def _set_properties(table: Path, properties: dict[str, str]) -> None:
    """Spark allows custom table properties; delta-rs writes only Delta's own."""
    first = table / "_delta_log" / f"{0:020}.json"
    actions = [json.loads(line) for line in first.read_text().splitlines()]
    for action in actions:
        if "metaData" in action:
            action["metaData"]["configuration"] = properties
    first.write_text("".join(json.dumps(action) + "\n" for action in actions))


@pytest.fixture
def lake(shop: Database, tmp_path: Path) -> Iterator[Lake]:
    made = Lake(shop, tmp_path)
    yield made
    made.drop_slot()


def test_a_run_that_can_go_on_is_ready(check: Checker, lake: Lake) -> None:
    report = check()
    assert report.problems == []
    assert (
        f"recorded up to {lake.position}" in {step.name: step for step in report.steps}["continuity"].detail
    )


def test_L01_a_slot_that_is_gone_under_filled_targets_is_a_problem(check: Checker, lake: Lake) -> None:
    lake.drop_slot()
    report = check()
    assert (report.exit_code, [(finding.step, finding.code) for finding in report.problems]) == (
        3,
        [("continuity", "PEN-1201")],
    )


def test_a_slot_that_is_past_the_targets_is_a_problem(shop: Database, check: Checker, lake: Lake) -> None:
    shop.execute("INSERT INTO items VALUES (7)")
    shop.query("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", lake.slot)
    assert [finding.code for finding in check().problems] == ["PEN-1205"]


def test_a_table_that_changed_its_columns_since_it_was_copied_is_a_problem_if_that_is_to_stop_it(
    shop: Database, check: Checker, lake: Lake
) -> None:
    shop.execute("ALTER TABLE orders ADD COLUMN extra int")
    assert check().problems == []
    problem = check(schema_changes="stop").problems[0]
    assert (problem.code, [str(table) for table in problem.tables]) == ("PEN-1403", ["public.orders"])
    assert "lake/public/orders" in (problem.fix or "")


def test_P08_a_table_that_left_the_publication_since_it_was_copied_is_a_problem(
    shop: Database, check: Checker, lake: Lake, tmp_path: Path
) -> None:
    for publication, recorded in (
        ("items, parted", {}),
        ("orders, items, parted", {TableName("public", "orders"): Membership(None, "1/2")}),
    ):
        save_memberships(tmp_path / "state", recorded)
        shop.execute(f"DROP PUBLICATION {lake.slot}")
        shop.execute(
            f"CREATE PUBLICATION {lake.slot} FOR TABLE {publication} WITH (publish_via_partition_root = true)"
        )
        found = [(finding.code, [str(table) for table in finding.tables]) for finding in check().problems]
        assert found == [("PEN-3002", ["public.orders"])], publication


def test_targets_of_another_system_are_a_problem(
    shop: Database, check: Checker, lake: Lake, tmp_path: Path
) -> None:
    EpochLog(tmp_path / "lake", lake.pipeline).record(
        Epoch(2, Position.of(lake.position.value + 1), None, "7/1")
    )
    assert [finding.code for finding in check().problems] == ["PEN-1206"]


@pytest.mark.versions(16)
def test_failover_on_a_server_that_has_none_is_a_problem(shop: Database, check: Checker) -> None:
    assert "PEN-1216" in {
        finding.code for finding in check(source={"dsn": shop.dsn, "failover": True}).problems
    }


def test_a_check_imports_no_spark(shop: Database, lake: Lake, tmp_path: Path) -> None:
    path = write_config(
        shop, tmp_path, {"tables": ["public.*", {"table": "public.orders", "where": "v LIKE 's%'"}]}
    )
    code = (
        "import sys; from pathlib import Path; from penstock.pipeline.checks.check import "
        f"check_pipeline as c; c(Path({str(path)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; assert 'pyspark' not in sys.modules"],
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0


def test_nothing_selected_is_a_matter_of_configuration(check: Checker) -> None:
    report = check(tables=["nothing.*"])
    assert (report.exit_code, [finding.code for finding in report.problems]) == (2, ["PEN-1401"])


def test_R18_only_a_table_that_never_enters_the_log_is_refused_for_that_reason_alone(
    shop: Database, check: Checker
) -> None:
    shop.execute("CREATE UNLOGGED TABLE fast (id int PRIMARY KEY)")
    report = check(tables=["public.fast"])
    assert (report.exit_code, [finding.code for finding in report.problems]) == (3, ["PEN-1404"])
    assert {step.name: step.state for step in report.steps}["reading"] is StepState.SKIPPED


def test_a_pattern_that_matches_nothing_beside_one_that_does_is_a_warning(check: Checker) -> None:
    report = check(tables=["public.*", "nothing.*"])
    assert report.problems == []
    assert [finding.what for finding in report.warnings if finding.code == "no-match"] == [
        "pattern nothing.* matches no table"
    ]


def test_a_secret_that_is_not_set_leaves_the_steps_at_the_source_untried(check: Checker) -> None:
    report = check(
        source={"dsn": "postgresql://cdc@127.0.0.1/shop", "password": {"env": "PENSTOCK_TEST_UNSET"}}
    )
    assert report.exit_code == 2
    states = {step.name: step.state for step in report.steps}
    assert {states[name] for name in ("connection", "server", "tables", "reading")} == {StepState.SKIPPED}


def test_R04_why_a_table_has_no_key_is_said(shop: Database, check: Checker) -> None:
    shop.execute("CREATE TABLE deferred (id int PRIMARY KEY DEFERRABLE)")
    shop.execute("CREATE TABLE nothing (id int PRIMARY KEY); ALTER TABLE nothing REPLICA IDENTITY NOTHING")
    found = {str(finding.tables[0]): finding for finding in check().problems}
    assert {finding.code for finding in found.values()} == {"PEN-1402"}
    assert "deferrable primary key" in found["public.deferred"].what
    assert "USING INDEX" in (found["public.deferred"].fix or "")
    assert "REPLICA IDENTITY NOTHING" in found["public.nothing"].what
    shop.execute((found["public.nothing"].fix or "").partition(" or ")[0])
    assert [str(finding.tables[0]) for finding in check().problems] == ["public.deferred"]


def test_partitions_with_other_keys_are_accepted_where_the_root_has_none_and_changes_are_appended(
    shop: Database, check: Checker, tmp_path: Path
) -> None:
    shop.execute("CREATE TABLE log (id int, ts int) PARTITION BY RANGE (ts)")
    shop.execute("CREATE TABLE log_a PARTITION OF log DEFAULT; ALTER TABLE log_a ADD PRIMARY KEY (id)")
    log = TableName("public", "log")
    rules = {mode: {"tables": [{"table": str(log), "mode": mode}]} for mode in ("append", "mirror")}
    assert check(**rules["append"]).problems == []
    failing = {}
    with connect(SourceAddress.parse(shop.dsn)) as connection:
        for mode, changes in rules.items():
            config = load_config(write_config(shop, tmp_path, changes))
            failing[mode] = set(source_adapter(config).unidentified_tables(connection, [log]))
    assert failing == {"append": set(), "mirror": {log}}, "while a pipeline runs"


def test_C02_a_source_that_cannot_be_reached_does_not_end_the_check(check: Checker) -> None:
    report = check(source={"dsn": "postgresql://cdc:hunter2@127.0.0.1:1/shop?connect_timeout=2"})
    assert report.exit_code == 3
    states = {step.name: step.state for step in report.steps}
    assert (states["connection"], states["tables"], states["target"]) == (
        StepState.PROBLEM,
        StepState.SKIPPED,
        StepState.OK,
    )
    assert "hunter2" not in json.dumps(report.as_document())


@pytest.mark.parametrize("broken", ["state", "sink"])
@pytest.mark.parametrize("below", ["file", "n" * 300])
def test_a_place_that_cannot_be_written_to_is_named(
    check: Checker, tmp_path: Path, broken: str, below: str
) -> None:
    """The check for existence itself fails for a name that is too long for the file system, as for a path
    below a directory without permission.
    """
    (tmp_path / "file").write_text("in the way")
    place = str(tmp_path / below / "below")
    report = check(**({"state": place} if broken == "state" else {"sink": {"delta": {"path": place}}}))
    assert (report.exit_code, [finding.code for finding in report.problems]) == (3, ["PEN-1003"])
    assert place in report.problems[0].what


def test_a_spool_that_may_outgrow_its_disk_is_a_warning(check: Checker) -> None:
    assert "spool-larger-than-disk" in {finding.code for finding in check(max_spool_bytes=1 << 60).warnings}


def test_the_command_prints_for_people_and_for_programs(shop: Database, tmp_path: Path) -> None:
    shop.execute("CREATE TABLE keyless (id int)")
    path = write_config(shop, tmp_path, {})
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "check", str(path), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    document = json.loads(done.stdout)
    assert done.returncode == document["exit_code"] == 3
    assert document.keys() == {"pipeline", "ok", "exit_code", "steps", "problems", "warnings"}
    assert document["problems"][0].keys() == {"step", "code", "what", "fix", "tables"}
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    with console.file:
        print_check(check_pipeline(path), console)
    text = console.export_text()
    assert "PEN-1402" in text
    assert 'fix: ALTER TABLE "public"."keyless" ADD PRIMARY KEY' in text


def test_K11_tables_routed_into_one_are_checked_as_one(shop: Database, check: Checker) -> None:
    for schema in ("s1", "s2"):
        shop.execute(f"CREATE SCHEMA {schema}; CREATE TABLE {schema}.orders (id int PRIMARY KEY, v text)")
    rules: list[Any] = ["public.items", {"match": "s*.orders", "into": "lake.orders"}]
    report = check(tables=rules)
    assert report.problems == []
    details = {step.name: step.detail for step in report.steps}
    assert details["tables"] == "2 selected"
    assert details["reading"] == "the first block of 3 tables"

    shop.execute("ALTER TABLE s2.orders ADD more int, ALTER v TYPE varchar(9)")
    (problem,) = check(tables=rules).problems
    assert problem.code == "PEN-1420"
    assert problem.tables == (TableName("lake", "orders"),)
    assert (
        "s2.orders has a column 'more', and s1.orders has not; column 'v' has another type in s2.orders "
        "than in s1.orders" in problem.what
    )

    shop.execute("DROP TABLE s2.orders; CREATE TABLE s2.orders (id int)")
    (problem,) = check(tables=rules).problems
    assert (
        "s2.orders, which is routed into lake.orders, cannot be mirrored: table s2.orders has no primary key"
        in problem.what
    )


def test_K12_transforms_that_do_not_fit_are_named_and_filters_that_may_lack_values_warned_of(
    shop: Database, check: Checker
) -> None:
    rules = [
        {"table": "public.orders", "where": "v LIKE 's%'"},
        {"table": "public.items", "columns": {"drop": ["id"]}},
        {"table": "public.parted", "where": "id > 5"},
    ]
    report = check(tables=rules)
    (problem,) = report.problems
    assert problem.code == TransformError.code
    assert "no column is left" in problem.what
    (warning,) = [each for each in report.warnings if each.code == "filter-may-lack-values"]
    assert warning.fix == "ALTER TABLE public.orders REPLICA IDENTITY FULL;"
    shop.execute(warning.fix)
    assert not [each for each in check(tables=rules).warnings if each.code == "filter-may-lack-values"]


def test_directories_with_rows_that_others_may_read_are_a_warning(
    shop: Database, check: Checker, tmp_path: Path
) -> None:
    pipeline = f"check_{shop.name.rsplit('_', 1)[-1]}"
    places = [
        tmp_path / "state",
        tmp_path / "state" / "spool",
        tmp_path / "lake" / "penstock_dead_letters" / pipeline,
    ]
    for place in places:
        place.mkdir(parents=True)
        place.chmod(0o750)
    found = [finding for finding in check().warnings if finding.code == "readable-by-others"]
    assert [finding.fix for finding in found] == [f"chmod -R go-rwx {place}" for place in places]
    for place in places:
        place.chmod(0o700)
    assert "readable-by-others" not in {finding.code for finding in check().warnings}


@pytest.mark.parametrize("schema", ["penstock_epochs", "penstock_dead_letters", "Penstock_Snapshots"])
def test_a_schema_named_like_a_directory_of_pipelines_is_refused_in_a_lake_unless_routed(
    shop: Database, check: Checker, schema: str
) -> None:
    shop.execute(f'CREATE SCHEMA "{schema}"; CREATE TABLE "{schema}".t (id int PRIMARY KEY)')
    rules = ["public.orders", f'"{schema}".t']
    (problem,) = check(tables=rules).problems
    assert (problem.code, [each.schema for each in problem.tables]) == ("PEN-1404", [schema])
    assert "into:" in (problem.fix or "")
    assert not check(tables=["public.orders", {"table": f'"{schema}".t', "into": "other.t"}]).problems
