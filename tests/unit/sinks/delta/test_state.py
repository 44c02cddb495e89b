"""Replay of a Delta log: tables that deltalake writes, and commits written by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyspark.sql import SparkSession

from penstock.errors import FileOutsideTableError, SinkError, TargetFileLostError
from penstock.position import Position
from penstock.sinks.base import SHADOWS
from penstock.sinks.delta.log import open_log, record_position
from penstock.sinks.delta.sink import DeltaSink
from penstock.sinks.delta.state import (
    DeltaState,
    DeltaStates,
    Metadata,
    Unsupported,
    can_delete,
    check_writable,
    file_schema,
    load_state,
    load_version,
    table_schema,
)
from penstock.sinks.row_files import renamed

VECTOR = {
    "storageType": "u",
    "pathOrInlineDv": "^-aqEH.-t@S}K{vb[*k^",
    "offset": 1,
    "sizeInBytes": 40,
    "cardinality": 6,
}


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "x": pa.array([str(each) for each in ids])})


def append(path: Path, *ids: int, position: int | None = None) -> None:
    transactions = [] if position is None else [Transaction("a", position)]
    write_deltalake(
        path, rows(*ids), mode="append", commit_properties=CommitProperties(app_transactions=transactions)
    )


def loaded(path: Path) -> DeltaState:
    state = load_state(path)
    assert state is not None
    return state


def by_hand(path: Path, *actions: dict[str, Any]) -> None:
    version = loaded(path).version + 1
    (path / "_delta_log" / f"{version:020d}.json").write_text(
        "\n".join(map(json.dumps, actions)), encoding="utf-8"
    )


def agrees(path: Path) -> bool:
    """Compare with deltalake everything that both support."""
    state, log = loaded(path), DeltaTable(path)
    files = {name: file.bytes for name, file in state.files.items()}
    actions = pa.table(log.get_add_actions(flatten=False)).to_pylist()
    return (
        state.version == log.version()
        and files == {each["path"]: each["size_bytes"] for each in actions}
        and state.transactions.get("a") == log.transaction_version("a")
        and table_schema(state.metadata).names == [field.name for field in log.schema().fields]
    )


def test_the_state_is_that_of_deltalake_through_appends_removals_and_a_checkpoint(tmp_path: Path) -> None:
    assert load_state(tmp_path) is None
    states = DeltaStates()
    append(tmp_path, 1, 2, position=5)
    begun = states.load(tmp_path)
    assert begun is not None
    assert agrees(tmp_path)
    for number in range(3, 6):
        append(tmp_path, number, position=number * 10)
    DeltaTable(tmp_path).delete("id = 3")
    assert agrees(tmp_path)
    DeltaTable(tmp_path).create_checkpoint()
    append(tmp_path, 9, position=99)
    assert agrees(tmp_path)
    for old in sorted((tmp_path / "_delta_log").glob("*.json"))[:3]:
        old.unlink()  # as the clean-up does after a checkpoint
    assert agrees(tmp_path)
    assert states.load(tmp_path) == loaded(tmp_path)


def test_only_later_commits_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock import storage

    append(tmp_path, 1)
    states = DeltaStates()
    states.load(tmp_path)
    append(tmp_path, 2)
    read: list[str] = []
    whole = storage.read

    def reading(path: Path) -> bytes | None:
        read.append(path.name)
        return whole(path)

    monkeypatch.setattr(storage, "read", reading)
    state = states.load(tmp_path)
    assert state is not None
    assert (state.version, len(state.files)) == (1, 2)
    states.load(tmp_path)
    assert read == [f"{1:020d}.json"]


def test_a_table_in_the_place_of_another_is_read_again(tmp_path: Path) -> None:
    states = DeltaStates()
    place = tmp_path / "t"
    for count in (3, 2):
        for number in range(count):
            append(place, number)
        before = states.load(place)
        assert before == loaded(place)
        shutil.rmtree(place)
    append(place, 7)
    append(place, 8)
    append(place, 9)
    assert states.load(place) == loaded(place)
    shutil.rmtree(place)
    assert states.load(place) is None


def test_a_vector_tells_one_state_of_a_file_from_the_next(tmp_path: Path) -> None:
    append(tmp_path, 1, 2)
    (file,) = loaded(tmp_path).files.values()
    gone = {"path": file.path, "dataChange": True, "deletionTimestamp": 1}
    by_hand(tmp_path, {"add": {**file.action, "deletionVector": VECTOR}}, {"remove": gone})
    (marked,) = loaded(tmp_path).files.values()
    assert marked.vector is not None
    assert (marked.vector.count, marked.vector.offset) == (6, 1)
    by_hand(tmp_path, {"remove": gone})  # of the file without a vector, which is missing
    assert len(loaded(tmp_path).files) == 1
    by_hand(tmp_path, {"remove": {**gone, "deletionVector": VECTOR}})
    assert not loaded(tmp_path).files


def test_a_checkpoint_in_parts_counts_when_all_parts_exist(tmp_path: Path) -> None:
    for number in range(4):
        append(tmp_path, number, position=number + 1)
    expected = loaded(tmp_path)
    DeltaTable(tmp_path).create_checkpoint()
    log = tmp_path / "_delta_log"
    (whole,) = log.glob("*.checkpoint.parquet")
    table = pq.read_table(whole)
    whole.unlink()
    for part in (1, 2):
        half = table.slice((part - 1) * 3, 3 if part == 1 else None)
        pq.write_table(half, log / f"{3:020d}.checkpoint.{part:010d}.{2:010d}.parquet")
    for commit in log.glob("*.json"):
        commit.unlink()
    found = loaded(tmp_path)
    assert found.files.keys() == expected.files.keys()
    assert (found.version, found.transactions, found.metadata.fields) == (
        3,
        expected.transactions,
        expected.metadata.fields,
    )
    assert [file.stats for file in found.files.values()] == [
        expected.files[name].stats for name in found.files
    ]
    (log / f"{3:020d}.checkpoint.{2:010d}.{2:010d}.parquet").unlink()
    with pytest.raises(Unsupported, match="unsupported kind"):
        load_state(tmp_path)


def test_uncertain_cases_are_left_to_delta(tmp_path: Path) -> None:
    append(tmp_path, 1)
    append(tmp_path, 2)
    log = tmp_path / "_delta_log"
    DeltaTable(tmp_path).create_checkpoint()
    (checkpoint,) = log.glob("*.checkpoint.parquet")
    table = pq.read_table(checkpoint)
    kind = pa.struct([("version", pa.int64())])
    foreign = pa.array([{"version": 1}, *[None] * (table.num_rows - 1)], kind)
    pq.write_table(table.append_column("checkpointMetadata", foreign), checkpoint)
    with pytest.raises(Unsupported, match="unsupported kind"):
        load_state(tmp_path)
    checkpoint.rename(log / f"{1:020d}.checkpoint.3a0d65cd-4056-49b8-937b-95f9e3ee90e5.parquet")
    assert loaded(tmp_path).version == 1
    (log / f"{0:020d}.json").unlink()
    with pytest.raises(Unsupported, match="beginning"):
        load_state(tmp_path)


def test_a_hole_and_a_broken_commit_are_no_table(tmp_path: Path) -> None:
    for number in range(3):
        append(tmp_path, number)
    log = tmp_path / "_delta_log"
    last = (log / f"{2:020d}.json").read_bytes()
    (log / f"{1:020d}.json").rename(log / "aside")
    with pytest.raises(Unsupported, match="missing"):
        load_state(tmp_path)
    (log / "aside").rename(log / f"{1:020d}.json")
    (log / f"{2:020d}.json").write_bytes(last[: len(last) // 2])
    with pytest.raises(TargetFileLostError, match="cannot be read"):
        load_state(tmp_path)


@pytest.mark.parametrize("damage", ["", "garbage", '{"commitInfo": {}}'])
def test_a_damaged_log_is_distinguished_from_an_unreadable_one(tmp_path: Path, damage: str) -> None:
    append(tmp_path, 0)
    commit = tmp_path / "_delta_log" / f"{0:020d}.json"
    whole = commit.read_text()
    commit.write_text(damage)
    with pytest.raises(TargetFileLostError):
        open_log(tmp_path)
    commit.write_text(whole)
    (tmp_path / "_delta_log" / f"{1:020d}.json").mkdir()  # reading it is an OSError
    with pytest.raises(SinkError) as raised:
        load_state(tmp_path)
    assert type(raised.value) is SinkError


@pytest.mark.parametrize(
    ("protocol", "properties", "metadata", "reason"),
    [
        (
            {
                "writerFeatures": [
                    "deletionVectors",
                    "columnMapping",
                    "appendOnly",
                    "invariants",
                    "timestampNtz",
                ]
            },
            {},
            {},
            None,
        ),
        ({"writerFeatures": ["rowTracking", "domainMetadata"]}, {}, {}, "rowTracking"),
        ({"writerFeatures": ["inCommitTimestamp"]}, {}, {}, "inCommitTimestamp"),
        ({"writerFeatures": ["catalogManaged"]}, {}, {}, "catalogManaged"),
        ({"readerFeatures": ["v2Checkpoint"]}, {}, {}, "v2Checkpoint"),
        ({"minWriterVersion": 8}, {}, {}, "versions"),
        ({}, {"delta.appendOnly": "true"}, {}, "appendOnly"),
        ({}, {"delta.appendOnly": "false"}, {}, None),
        ({}, {"delta.enableChangeDataFeed": "TRUE"}, {}, "ChangeDataFeed"),
        ({}, {"delta.constraints.positive": "id > 0"}, {}, "constraints"),
        ({}, {"delta.columnMapping.mode": "id"}, {}, "by id"),
        ({}, {"delta.columnMapping.mode": "name"}, {}, None),
        ({}, {}, {"delta.invariants": "{}"}, "invariants"),
        ({}, {}, {"delta.generationExpression": "id + 1"}, "generationExpression"),
        ({}, {}, {"delta.identity.start": 1}, "identity"),
    ],
)
def test_features_that_we_do_not_know_to_be_safe_leave_the_table_to_delta(
    protocol: dict[str, Any], properties: dict[str, str], metadata: dict[str, Any], reason: str | None
) -> None:
    fields = [
        {
            "name": "s",
            "type": {
                "type": "struct",
                "fields": [{"name": "x", "type": "long", "nullable": True, "metadata": metadata}],
            },
        }
    ]
    action = {
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "configuration": properties,
        "partitionColumns": [],
    }
    state = DeltaState(
        0, {"minReaderVersion": 3, "minWriterVersion": 7, **protocol}, Metadata(action), {}, {}
    )
    if reason is None:
        check_writable(state)
    else:
        with pytest.raises(Unsupported, match=reason):
            check_writable(state)


def test_a_column_that_takes_no_nulls_leaves_the_table_to_delta() -> None:
    """Delta checks the constraint for every row; our own commits would not."""
    field = {"name": "x", "type": "long", "nullable": False, "metadata": {}}
    action = {
        "schemaString": json.dumps({"type": "struct", "fields": [field]}),
        "configuration": {},
        "partitionColumns": [],
    }
    with pytest.raises(Unsupported, match="NOT NULL"):
        check_writable(
            DeltaState(0, {"minReaderVersion": 3, "minWriterVersion": 7}, Metadata(action), {}, {})
        )


def test_rows_are_taken_out_only_where_the_table_has_vectors_switched_on() -> None:
    def state(features: list[str], value: str) -> DeltaState:
        metadata = Metadata(
            {"schemaString": '{"fields": []}', "configuration": {"delta.enableDeletionVectors": value}}
        )
        return DeltaState(
            0, {"minReaderVersion": 3, "minWriterVersion": 7, "writerFeatures": features}, metadata, {}, {}
        )

    assert can_delete(state(["deletionVectors"], "true"))
    assert not can_delete(state(["deletionVectors"], "false"))
    assert not can_delete(state([], "true"))


def test_a_table_with_partitions_is_left_to_delta(tmp_path: Path) -> None:
    write_deltalake(tmp_path, rows(1, 2), partition_by=["x"])
    with pytest.raises(Unsupported, match="partitions"):
        check_writable(loaded(tmp_path))


def test_names_of_mapped_columns_are_those_of_the_files_inside_of_structs_too() -> None:
    def mapped(name: str, kind: object, number: int) -> dict[str, object]:
        metadata = {"delta.columnMapping.physicalName": f"col-{number}", "delta.columnMapping.id": number}
        return {"name": name, "type": kind, "nullable": True, "metadata": metadata}

    inner = {"type": "struct", "fields": [mapped("a b", "timestamp_ntz", 3), mapped("c", "decimal(12,2)", 4)]}
    listed = {"type": "array", "elementType": inner, "containsNull": True}
    fields = [mapped("x", "long", 1), mapped("y z", listed, 2)]
    metadata = Metadata({"schemaString": json.dumps({"type": "struct", "fields": fields})})
    own, files = table_schema(metadata), file_schema(metadata)
    assert (own.names, files.names) == (["x", "y z"], ["col-1", "col-2"])
    assert [child.name for child in files.field(1).type.value_type] == ["col-3", "col-4"]
    assert files.field(0).metadata == {b"PARQUET:field_id": b"1"}
    rows = [pa.array([1, 2, 3]), pa.array([[{"a b": None, "c": None}, None], None, []], own.field(1).type)]
    batch = pa.record_batch(rows, schema=own).slice(1)
    there = renamed(batch.columns, files)
    assert there.schema.equals(files)
    assert renamed(there.columns, own).equals(batch)


def test_a_position_that_deltalake_commits_is_seen(tmp_path: Path) -> None:
    append(tmp_path, 1)
    record_position(tmp_path, "a", Position.of(77))
    assert loaded(tmp_path).transactions == {"a": 77}


@pytest.mark.parametrize(
    "path", ["../x.parquet", "%2E%2E/x.parquet", "/else/x.parquet", "file:///else/x.parquet"]
)
def test_a_log_that_adds_a_file_outside_the_table_is_refused(tmp_path: Path, path: str) -> None:
    append(tmp_path, 1)
    by_hand(
        tmp_path,
        {"add": {"path": path, "size": 1, "partitionValues": {}, "modificationTime": 1, "dataChange": True}},
    )
    with pytest.raises(FileOutsideTableError):
        load_state(tmp_path)


def test_a_table_whose_log_is_damaged_does_not_keep_shadows_of_others_from_being_dropped(
    tmp_path: Path,
) -> None:
    """A shadow of a former run, whose files are linked already; dropping them is the first step of a run."""
    table, shadows = tmp_path / "public" / "t", tmp_path / SHADOWS / "shop"
    shadow = shadows / "copy" / "public" / "t"
    for each in (table, shadow):
        write_deltalake(each, pa.table({"id": [1]}))
    (data,) = shadow.glob("*.parquet")
    (table / data.name).hardlink_to(data)
    (table / "_delta_log" / f"{0:020d}.json").write_text("{")
    with pytest.raises(SinkError):
        load_state(table)
    DeltaSink(cast("SparkSession", None), tmp_path, "shop").drop_shadows()
    assert not shadows.exists()


def test_a_log_that_cannot_be_read_is_not_quoted(tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"id": [1]}))
    (tmp_path / "_delta_log" / f"{1:020d}.json").write_text(
        json.dumps({"txn": {"appId": "a", "version": "some value"}})
    )
    for load in (load_state, lambda path: load_version(path, 1)):
        with pytest.raises(SinkError) as raised:
            load(tmp_path)
        assert "some value" not in raised.value.message
