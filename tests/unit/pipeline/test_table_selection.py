from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from typing_extensions import override

from penstock.config.model import PipelineConfig
from penstock.contracts.provisioning import Blocker, CoverageReport
from penstock.errors import (
    NoTablesError,
    PenstockError,
    PositionGapError,
    PrivilegeError,
    SinkError,
    SpoolCorruptError,
    TargetFileLostError,
    UnsupportedTableError,
)
from penstock.pipeline.error_policy import (
    FILE_ATTEMPTS,
    PATIENT_ATTEMPTS,
    USUAL_ATTEMPTS,
    attempts_without_any_target,
)
from penstock.pipeline.sources.resume_checks import (
    fail_rejoined,
    load_memberships,
    record_memberships,
    save_memberships,
    update_memberships,
)
from penstock.pipeline.table_selection import Selection, check_selected, inspect_pipeline
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.pipeline.tables import Tables, fail_blocked, fail_over_holes
from penstock.position import Position
from penstock.postgres.catalog import CatalogTable
from penstock.postgres.membership import Membership
from penstock.schema import Column, TableName, TableSchema
from penstock.sinks.base import SNAPSHOTS, Target, Targets
from penstock.storage.temporary import is_case_sensitive

GOOD, BAD = TableName("public", "good"), TableName("public", "bad")


def _blocked(*tables: TableName) -> CoverageReport:
    return CoverageReport(
        False,
        blockers=(Blocker("PEN-1104", "only app may publish it", "as app: CREATE PUBLICATION p;", tables),),
    )


def _pending(state: TableState = TableState.PENDING) -> Tables:
    return Tables(statuses={name: TableStatus(state) for name in (GOOD, BAD)})


def test_a_table_that_cannot_be_published_fails_alone_with_its_remedy() -> None:
    tables = _pending()
    fail_blocked(tables, _blocked(BAD))
    assert tables.capturable == [GOOD]
    assert tables.statuses[BAD].reason == "PEN-1104: only app may publish it"
    assert tables.statuses[BAD].remedy == "as app: CREATE PUBLICATION p;"


def test_when_no_table_can_be_published_nothing_starts() -> None:
    with pytest.raises(PrivilegeError, match="only app"):
        fail_blocked(_pending(), _blocked(GOOD, BAD))


def test_problems_of_the_whole_publication_are_left_to_ensure() -> None:
    tables = _pending()
    fail_blocked(tables, _blocked())
    assert tables.capturable == [GOOD, BAD]


class Shelf(Targets):
    """A target with nothing in it, on a filesystem that folds case or does not."""

    def __init__(self, *, folds: bool) -> None:
        self._folds = folds

    @override
    def load_target(self, table: TableName) -> Target | None:
        return None

    @override
    def describe(self, table: TableName) -> str:
        return f"shelf/{table}"

    @override
    def are_distinct(self, one: TableName, other: TableName) -> bool:
        return not self._folds


class Broken(Shelf):
    """Fails to read some of its targets."""

    def __init__(self, *broken: TableName) -> None:
        super().__init__(folds=False)
        self._broken = broken

    @override
    def load_target(self, table: TableName) -> Target | None:
        if table in self._broken:
            raise SinkError(f"the log of {table} cannot be read")
        return super().load_target(table)


def test_an_unreadable_target_fails_its_table_and_all_of_them_once_the_shared_part_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.pipeline.table_selection._LOAD_PAUSE_SECONDS", 0.0)
    found = {name: CatalogTable(number, name) for number, name in enumerate((GOOD, BAD), 1)}
    schemas = {
        name: TableSchema(table.oid, name, (Column("id", pa.int32(), 23),), ("id",))
        for name, table in found.items()
    }
    asked: list[list[str]] = []

    def note(errors: Mapping[TableName, PenstockError]) -> None:
        asked.append([error.message for error in errors.values()])

    tables = inspect_pipeline(Selection(found, schemas, {}), Broken(BAD), None, on_none_readable=note)
    assert {name: status.state for name, status in tables.statuses.items()} == {
        GOOD: TableState.PENDING,
        BAD: TableState.FAILED,
    }
    remedy = tables.statuses[BAD].remedy or ""
    assert remedy.startswith("restore shelf/public.bad, or remove it")
    assert remedy.endswith("then penstock tables resync CONFIG public.bad")
    assert not asked, "another target can be read"
    tables = inspect_pipeline(Selection(found, schemas, {}), Broken(GOOD, BAD), None, on_none_readable=note)
    assert {status.state for status in tables.statuses.values()} == {TableState.FAILED}
    assert asked == [["the log of public.good cannot be read", "the log of public.bad cannot be read"]]


def test_a_damaged_file_of_every_target_is_retried_less_often_than_a_shared_cause() -> None:
    lost, other = TargetFileLostError("damaged"), SinkError("refused")
    bounds = [
        attempts_without_any_target(errors) for errors in ([lost], [lost, lost], [other], [lost, other])
    ]
    assert bounds == [FILE_ATTEMPTS, FILE_ATTEMPTS, USUAL_ATTEMPTS, PATIENT_ATTEMPTS]


@pytest.mark.parametrize("folds", [True, False])
def test_R15_tables_that_differ_only_in_case_are_refused_where_the_target_has_one_place_for_them(
    *, folds: bool
) -> None:
    names = [TableName("public", "Items"), TableName("public", "items"), TableName("public", "other")]
    schemas = {
        name: TableSchema(oid, name, (Column("id", pa.int32(), 23),), ("id",))
        for oid, name in enumerate(names)
    }
    selection = Selection(
        {name: CatalogTable(schema.oid, name) for name, schema in schemas.items()}, schemas, {}
    )
    tables = inspect_pipeline(selection, Shelf(folds=folds), None)
    assert tables.capturable == (names[2:] if folds else names)
    if folds:
        assert "public.Items, public.items differ only in case" in (tables.statuses[names[0]].reason or "")
        assert tables.statuses[names[1]].remedy == "rename or exclude all of them but one"


def test_R15_a_directory_says_whether_it_is_case_sensitive(tmp_path: Path) -> None:
    (tmp_path / "probe").touch()
    assert is_case_sensitive(tmp_path) is not (tmp_path / "PROBE").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["probe"]


def test_R18_an_empty_selection_is_reported_with_the_reason_for_each_named_table() -> None:
    with pytest.raises(NoTablesError, match="no table of shop matches a pattern"):
        check_selected(Selection({}, {}, {}), "shop")
    with pytest.raises(UnsupportedTableError, match="unlogged"):
        check_selected(Selection({}, {}, {GOOD: UnsupportedTableError("unlogged")}), "shop")


def _filled() -> Tables:
    return Tables(
        statuses={
            name: TableStatus(TableState.CATCHING_UP, Position.parse("0/5"), Position.parse("0/5"))
            for name in (GOOD, BAD)
        }
    )


def _memberships(good: str, bad: str) -> dict[TableName, Membership]:
    return {GOOD: Membership(None, good), BAD: Membership(None, bad)}


def _config(root: Path) -> PipelineConfig:
    return PipelineConfig.model_validate(
        {
            "pipeline": "shop",
            "source": {"dsn": "dbname=shop"},
            "tables": [{"table": "public.good"}, {"table": "public.bad"}],
            "sink": {"delta": {"path": str(root / "lake")}},
            "state": str(root / "state"),
        }
    )


def test_P08_a_table_that_left_the_publication_and_returned_fails_until_it_is_resynced(
    tmp_path: Path,
) -> None:
    assert load_memberships(tmp_path) == {}
    save_memberships(tmp_path, fail_rejoined(_filled(), {}, _memberships("1/10", "1/11"), str))
    for _ in range(
        2
    ):  # a run that ends before the failure is written down must not make the next one forget it
        tables = _filled()
        save_memberships(
            tmp_path, fail_rejoined(tables, load_memberships(tmp_path), _memberships("1/10", "1/12"), str)
        )
        assert tables.capturable == [GOOD]
        assert "remove public.bad" in (tables.statuses[BAD].remedy or "")
    anew = _pending()
    save_memberships(
        tmp_path, fail_rejoined(anew, load_memberships(tmp_path), _memberships("1/10", "1/12"), str)
    )
    assert anew.capturable == [GOOD, BAD]
    assert load_memberships(tmp_path) == _memberships("1/10", "1/12")


@pytest.mark.parametrize("state", [TableState.PENDING, TableState.PAUSED])
def test_P08_an_unfinished_snapshot_is_forgotten_if_its_table_left_the_publication_and_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: TableState
) -> None:
    """Its chunks lack the changes from the time between, and the spool does not have them either. A table may
    be paused before its snapshot is complete.
    """
    config = _config(tmp_path)
    snapshots = tmp_path / "lake" / SNAPSHOTS / "shop"
    unfinished = [snapshots / name.schema / name.name / "plan.json" for name in (GOOD, BAD)]
    for path in unfinished:
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    before, now = _memberships("1/10", "1/11"), _memberships("1/10", "1/12")

    def end(*_: object) -> None:
        raise OSError("the run ends")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.pipeline.sources.resume_checks.save_memberships", end)
        with pytest.raises(OSError, match="the run ends"):
            record_memberships(config, _pending(state), before, now, str, is_alone=True)
    assert [path.exists() for path in unfinished] == [True, False], "before the new membership is recorded"
    tables = _pending(state)
    record_memberships(config, tables, before, now, str, is_alone=True)
    assert tables.unpublished == {BAD}
    assert tables.capturable == [GOOD, BAD]
    assert load_memberships(config.state) == now


def test_a_resync_that_ends_while_tables_are_added_keeps_its_membership(tmp_path: Path) -> None:
    """The main thread has loaded the memberships when the thread of an epoch records that of a resync."""
    config = _config(tmp_path)
    save_memberships(config.state, {GOOD: Membership(None, "1/10")})
    tables = Tables(statuses={BAD: TableStatus(TableState.PENDING)})
    found = {BAD: Membership(None, "1/11")}

    recorded = load_memberships(config.state)
    update_memberships(config.state, {GOOD: Membership(None, "1/20")})
    record_memberships(config, tables, recorded, found, str, is_alone=False)
    assert load_memberships(config.state) == _memberships("1/20", "1/11")


def test_P08_a_record_of_a_former_version_learns_which_act_published_the_schema() -> None:
    tables = _filled()
    kept = fail_rejoined(
        tables, _memberships("1/all", "1/all"), _memberships("1/schema-7", "2/schema-7"), str
    )
    assert tables.capturable == [GOOD]
    assert kept == _memberships("1/schema-7", "1/all")
    again = _filled()
    fail_rejoined(
        again, _memberships("1/schema-7", "1/schema-7"), _memberships("1/schema-7", "1/schema-8"), str
    )
    assert again.capturable == [GOOD]


def test_a_hole_under_all_tables_is_the_slots_fault_unless_other_tables_continue() -> None:
    tables = Tables(statuses={GOOD: TableStatus(TableState.CATCHING_UP, Position.of(10), Position.of(10))})
    with pytest.raises(PositionGapError):
        fail_over_holes(tables, None, Position.of(20), "s", str)
    fail_over_holes(tables, None, Position.of(20), "s", str, is_alone=False)
    assert tables.statuses[GOOD].state is TableState.FAILED
    assert "copy the table again" in (tables.statuses[GOOD].remedy or "")


def test_a_record_of_memberships_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "membership.json").write_text("{")
    with pytest.raises(SpoolCorruptError, match=r"membership\.json"):
        load_memberships(tmp_path)
