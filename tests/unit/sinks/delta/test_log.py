"""The contents of a Delta log for one table, without Spark."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from penstock.errors import TargetRewoundError
from penstock.position import Position
from penstock.schema import GEOMETRY_TYPE, TableName
from penstock.sinks.base import SnapshotFile
from penstock.sinks.delta.log import (
    KEY,
    OWNER,
    SOURCE_OID,
    _plain,
    adopt_files,
    application_id,
    has_moved,
    held_position,
    load_applied,
    load_target,
    load_with_position,
    record_position,
    remove_attempts,
    settle_restored,
    unfinished_files,
    version_at,
)
from penstock.sinks.delta.spark_merge import may_be_text
from penstock.sinks.delta.state import DeltaStates

NESTED = pa.schema(
    [
        ("texts", pa.list_(pa.string())),
        ("lists", pa.list_(pa.list_(pa.decimal128(12, 2)))),
        ("map", pa.map_(pa.string(), pa.string())),
        ("maps", pa.list_(pa.map_(pa.string(), pa.string()))),
        ("shape", GEOMETRY_TYPE),
        (
            "sparse",
            pa.struct(
                [
                    ("dimensions", pa.int32()),
                    ("indices", pa.list_(pa.int32())),
                    ("values", pa.list_(pa.float32())),
                ]
            ),
        ),
        ("moments", pa.list_(pa.timestamp("us", "UTC"))),
    ]
)


def test_types_with_structure_come_back_as_they_were_written(tmp_path: Path) -> None:
    """A table whose types seem to differ from the source's would be reported as changed."""
    write_deltalake(tmp_path, NESTED.empty_table())
    _set_properties(tmp_path, {OWNER: "p", KEY: json.dumps(["texts"]), SOURCE_OID: "1"})
    target = load_target(tmp_path, "p", TableName("s", "t"))
    assert target is not None
    assert target.schema.equals(NESTED)


@pytest.mark.parametrize(
    ("answered", "plain"),
    [
        (pa.large_list(pa.string_view()), pa.list_(pa.string())),
        (pa.map_(pa.large_string(), pa.binary_view()), pa.map_(pa.string(), pa.binary())),
        (pa.struct([("a", pa.large_list(pa.large_binary()))]), pa.struct([("a", pa.list_(pa.binary()))])),
    ],
)
def test_other_forms_of_a_type_are_the_same_type_however_deep_they_are(
    answered: pa.DataType, plain: pa.DataType
) -> None:
    """The form of delta-rs' answer depends on its version."""
    assert _plain(answered) == plain


def _set_properties(path: Path, properties: dict[str, str]) -> None:
    """As Spark does; delta-rs itself writes only properties that it knows."""
    log = path / "_delta_log" / f"{0:020d}.json"
    actions = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    for action in actions:
        action.get("metaData", {}).setdefault("configuration", {}).update(properties)
    log.write_text("\n".join(map(json.dumps, actions)), encoding="utf-8")


@pytest.mark.parametrize("arrow_type", [*NESTED.types, pa.decimal128(5, 2), pa.date32(), pa.timestamp("us")])
def test_a_key_that_may_be_beyond_its_type_is_known_by_its_text_too(arrow_type: pa.DataType) -> None:
    assert may_be_text(arrow_type)


@pytest.mark.parametrize("arrow_type", [pa.int64(), pa.string(), pa.binary(), pa.bool_(), pa.float64()])
def test_a_key_that_its_type_always_holds_needs_no_exact_text(arrow_type: pa.DataType) -> None:
    assert not may_be_text(arrow_type)


def test_the_version_of_a_position_is_the_last_one_before_any_of_our_later_commits(tmp_path: Path) -> None:
    """Commits of others in between belong to it: that is how an external change is detected."""
    write_deltalake(tmp_path, pa.table({"id": [1]}))  # version 0
    record_position(tmp_path, "a", Position.of(10))
    write_deltalake(tmp_path, pa.table({"id": [2]}), mode="append")  # version 2, by another writer
    record_position(tmp_path, "other", Position.of(99))
    record_position(tmp_path, "a", Position.of(20))  # version 4
    write_deltalake(tmp_path, pa.table({"id": [3]}), mode="append")
    found = {value: version_at(tmp_path, "a", Position.of(value)) for value in (9, 10, 19, 20, 21)}
    assert found == {9: None, 10: 3, 19: 3, 20: 5, 21: 5}
    record_position(tmp_path, "a", Position.ZERO)  # version 6: the contents no longer count as a copy
    record_position(tmp_path, "a", Position.of(30))
    assert [version_at(tmp_path, "a", Position.of(value)) for value in (10, 20, 30)] == [3, 5, 7]
    assert version_at(tmp_path / "none", "a", Position.of(10)) is None


def test_K09_a_restored_table_reports_its_current_position_and_not_a_former_one(tmp_path: Path) -> None:
    table = tmp_path / "table"
    write_deltalake(table, pa.table({"id": [1]}))
    _set_properties(table, {OWNER: "p", KEY: json.dumps(["id"]), SOURCE_OID: "1"})
    name = TableName("s", "t")
    application = application_id("p", name)
    for number in (10, 20, 30):
        write_deltalake(table, pa.table({"id": [number]}), mode="append")
        record_position(table, application, Position.of(number))
    log = DeltaTable(table)
    log.restore(4)  # at 20; then another writer adds and deletes rows
    DeltaTable(table).delete("id = 1")
    record_position(table, "other", Position.of(99))
    assert load_applied(table, application) == Position.of(20)
    target = load_target(table, "p", name)
    assert target is not None
    assert target.applied == Position.of(20)
    states = DeltaStates()
    assert load_with_position(states, table, application)[1] == Position.of(20)

    settle_restored(table, application)
    assert DeltaTable(table).transaction_version(application) == 20
    version = DeltaTable(table).version()
    settle_restored(table, application)
    assert DeltaTable(table).version() == version, "once is enough"
    state, applied = load_with_position(states, table, application)
    assert (applied, state and state.restored) == (Position.of(20), frozenset())

    DeltaTable(table).restore(0)
    assert load_applied(table, application) is None, "it was there before the first copy was"


def test_a_log_without_the_version_a_table_was_restored_to_is_named(tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"id": [1]}))
    for number in (10, 20):
        write_deltalake(tmp_path, pa.table({"id": [number]}), mode="append")
    record_position(tmp_path, "a", Position.of(20))
    DeltaTable(tmp_path).restore(0)
    (tmp_path / "_delta_log" / f"{1:020d}.json").unlink()
    with pytest.raises(TargetRewoundError, match="does not reach back"):
        held_position(tmp_path, "a", 4)
    (tmp_path / "_delta_log" / f"{4:020d}.json").unlink()
    (tmp_path / "_delta_log" / f"{3:020d}.json").unlink()
    assert held_position(tmp_path, "a", 3) is None


@pytest.fixture
def begun_late(tmp_path: Path) -> Path:
    """A table at 30, whose log begins with the checkpoint of version 3, at 10; the commit at 10 is another
    writer's.
    """
    write_deltalake(tmp_path, pa.table({"id": [1]}))
    write_deltalake(tmp_path, pa.table({"id": [10]}), mode="append")
    record_position(tmp_path, "a", Position.of(10))
    DeltaTable(tmp_path).optimize.compact()
    DeltaTable(tmp_path).create_checkpoint()
    write_deltalake(tmp_path, pa.table({"id": [30]}), mode="append")
    record_position(tmp_path, "a", Position.of(30))
    for version in range(3):
        (tmp_path / "_delta_log" / f"{version:020d}.json").unlink()
    return tmp_path


def test_K09_a_table_restored_to_where_its_log_begins_has_the_position_of_the_checkpoint_there(
    begun_late: Path,
) -> None:
    assert load_applied(begun_late, "a") == Position.of(30)
    DeltaTable(begun_late).restore(3)
    assert DeltaTable(begun_late).transaction_version("a") == 30
    assert held_position(begun_late, "a", 6) == Position.of(10)
    assert load_applied(begun_late, "a") == Position.of(10)
    assert held_position(begun_late, "another", 6) == Position.ZERO


def test_K09_a_table_restored_to_a_version_that_nothing_speaks_of_any_more_is_refused(
    begun_late: Path,
) -> None:
    DeltaTable(begun_late).restore(3)
    DeltaTable(begun_late).create_checkpoint()
    (begun_late / "_delta_log" / f"{3:020d}.checkpoint.parquet").unlink()
    with pytest.raises(TargetRewoundError, match="does not reach back"):
        load_applied(begun_late, "a")


def test_a_trimmed_log_gives_no_earlier_versions_and_was_not_restored(begun_late: Path) -> None:
    assert held_position(begun_late, "a", 3) is None


def test_our_commits_after_a_version_are_seen_and_those_of_others_are_not(tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"id": [1]}))
    record_position(tmp_path, "a", Position.of(10))
    record_position(tmp_path, "other", Position.of(99))
    assert has_moved(tmp_path, "a", 0)
    assert not has_moved(tmp_path, "a", 1)
    assert has_moved(tmp_path, "other", 1)
    assert not has_moved(tmp_path, "other", 2)


def test_files_of_unfinished_snapshots_go_and_those_of_older_versions_stay(tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"id": pa.array([], pa.int64())}))
    pq.write_table(pa.table({"id": [1]}), tmp_path / "snapshot-0A-000000-aa.parquet")
    first = SnapshotFile(
        "snapshot-0A-000000-aa.parquet", 1, (tmp_path / "snapshot-0A-000000-aa.parquet").stat().st_size, "{}"
    )
    (tmp_path / "snapshot-0A-000000-bb.parquet").write_bytes(b"another attempt")
    (tmp_path / "snapshot-0B-000000-cc.parquet").write_bytes(b"another snapshot")
    adopt_files(tmp_path, "a", [first], Position.of(10))
    remove_attempts(tmp_path, [first])
    assert {file.name[9:11] for file in tmp_path.glob("snapshot-*")} == {"0A", "0B"}
    assert not (tmp_path / "snapshot-0A-000000-bb.parquet").exists()
    write_deltalake(tmp_path, pa.table({"id": [9]}), mode="overwrite")
    assert unfinished_files(tmp_path) == {tmp_path / "snapshot-0B-000000-cc.parquet"}
    assert DeltaTable(tmp_path, version=1).to_pyarrow_table().to_pylist() == [{"id": 1}]
    (tmp_path / "snapshot-0B-000000-cc.parquet").unlink()
    assert unfinished_files(tmp_path) == set()
