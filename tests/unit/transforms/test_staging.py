"""Transformed changes are staged as files of the same kind as spool files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.change import CHANGE_TYPE, ChangeCounts
from penstock.errors import RowRefusedError, SinkError, ValuesMissingError
from penstock.pipeline.transform_sink import TransformingSink
from penstock.position import Position
from penstock.schema import TableName
from penstock.secret import Secret
from penstock.sinks.base import TableChanges, Target
from penstock.sinks.lineage import Origin
from penstock.transforms.apply import transform_changes
from penstock.transforms.columns import Mask
from penstock.transforms.staging import read_source
from penstock.transforms.transform import Transform
from tests.support.sinks.history import PLAIN
from tests.support.snapshot.local import LocalExecutors
from tests.support.transforms.staging import RecordingSink

COLUMNS = Transform(
    drop=("blob",), rename={"note": "remark"}, hash=("id",), mask={"note": Mask(2)}, key=Secret("k")
)


def sink_with(transform: Transform, directory: Path) -> tuple[RecordingSink, TransformingSink, Target]:
    sink = RecordingSink(directory / "lake")
    target = Target(
        PLAIN.name,
        PLAIN.oid,
        PLAIN.key,
        pa.schema([]),
        Position.of(1),
        origin=Origin({}, 1, "", transform.fingerprint),
    )
    return sink, TransformingSink(sink, lambda _: transform, LocalExecutors(), directory / "staged"), target


@pytest.mark.parametrize("transform", [COLUMNS, Transform(where="id >= 0")], ids=["columns", "where"])
def test_a_sink_is_given_transformed_changes_in_the_order_of_the_log(
    transform: Transform, changes: TableChanges, tmp_path: Path
) -> None:
    sink, seen, target = sink_with(transform, tmp_path)
    seen.apply(target, changes, Position.of(10**9))
    expected = transform_changes(transform.fit(PLAIN), read_source(changes.slices, PLAIN))
    assert expected.refused.num_rows == 0
    assert sink.taken.equals(expected.kept)
    kinds = sink.taken.column(CHANGE_TYPE).to_pylist()
    counts = sink.changes.counts
    assert (counts.inserts, counts.updates, counts.deletes, counts.truncates) == tuple(
        kinds.count(kind) for kind in ("insert", "update_postimage", "delete", "truncate")
    )
    assert counts == sum((each.file.counts for each in sink.changes.slices), ChangeCounts())
    positions = [(each.file.min_position, each.file.max_position) for each in sink.changes.slices]
    assert positions == sorted(positions)
    assert not list((tmp_path / "staged").iterdir()), "nothing is left when it is applied"


def test_a_row_that_enters_the_filter_without_its_values_is_named(
    changes: TableChanges, tmp_path: Path
) -> None:
    sink, seen, target = sink_with(Transform(where="id >= 0"), tmp_path)
    sink.error = ValuesMissingError("the value is missing")
    with pytest.raises(
        RowRefusedError, match="into the filter, and the change lacks unchanged TOAST values of the row"
    ) as caught:
        seen.apply(target, changes, Position.of(10**9))
    assert "REPLICA IDENTITY FULL" in (caught.value.hint or "")
    assert not list((tmp_path / "staged").iterdir())


def test_changes_are_not_applied_to_the_result_of_another_transform(
    changes: TableChanges, tmp_path: Path
) -> None:
    _, seen, target = sink_with(COLUMNS, tmp_path)
    other = Target(
        target.table,
        target.source_oid,
        target.key,
        target.schema,
        target.applied,
        origin=Origin({}, 1, "", "other"),
    )
    with pytest.raises(SinkError, match="changed while an epoch was being applied"):
        seen.apply(other, changes, Position.of(10**9))


def test_tables_without_a_transform_are_passed_on_as_they_are(changes: TableChanges, tmp_path: Path) -> None:
    sink = RecordingSink(tmp_path / "lake")
    seen = TransformingSink(sink, lambda _: None, LocalExecutors(), tmp_path / "staged")
    target = Target(TableName("public", "plain"), PLAIN.oid, PLAIN.key, pa.schema([]), Position.of(1))
    seen.apply(target, changes, Position.of(10**9))
    assert sink.changes is changes


@pytest.mark.parametrize(("where", "unchanged"), [("id >= 0", 1), ("id >= 0", 0), (None, 1)])
def test_only_a_filter_of_changes_with_unchanged_values_needs_earlier_changes(
    changes: TableChanges, tmp_path: Path, where: str | None, unchanged: int
) -> None:
    """A value that the filter needs may be in an earlier part of a backlog."""
    transform = Transform(where=where) if where else COLUMNS
    _, seen, _ = sink_with(transform, tmp_path)
    slices = [
        replace(slice, file=replace(slice.file, counts=replace(slice.file.counts, unchanged=unchanged)))
        for slice in changes.slices
    ]
    found = seen.needs_earlier_changes(replace(changes, slices=slices))
    assert found is (where is not None and unchanged > 0)
