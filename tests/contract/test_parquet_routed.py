"""Several tables routed into one Parquet log: every change once, with the name of its source table."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds

from penstock.position import Position
from penstock.sinks.modes import Mode
from penstock.sinks.parquet.sink import ParquetSink
from penstock.spool import SpoolReader, SpoolWriter
from tests.support.property.histories import Sizes, source_model
from tests.support.property.routed import FENCE, SOURCE, Shards
from tests.support.property.source_model import SourceModel
from tests.support.sinks.history import PLAIN
from tests.support.sinks.source import own_arrays
from tests.support.snapshot.local import LocalExecutors


def test_K11_K15_a_log_has_every_change_of_every_table_under_its_name(tmp_path: Path) -> None:
    members: list[SourceModel] = [source_model(PLAIN, Sizes(seed, 4, 10, 0.5)) for seed in range(2)]
    shards = Shards(
        PLAIN,
        [member.log for member in members],
        lambda at, position: members[at].expected(Mode.MIRROR, position),
    )
    sink = ParquetSink(LocalExecutors(), tmp_path / "log", "p")
    place, files = sink.begin_snapshot(shards.schema, Position.of(FENCE)), []
    for at, member in enumerate(members):
        rows = member.states[FENCE]
        arrays = [*own_arrays(PLAIN, rows), pa.array([f"s{at}.t"] * len(rows), pa.string())]
        names = [*shards.schema.column_names, "_exact"]
        batch = pa.RecordBatch.from_arrays(
            [*arrays, pa.nulls(len(rows), pa.map_(pa.string(), pa.string()))], names=names
        )
        assert sink.chunk_writer is not None
        files.append(sink.chunk_writer(iter([batch]), place, at, Position.of(FENCE))[0])
    sink.finish_snapshot(shards.schema, files, Position.of(FENCE))

    end = shards.positions[-1]
    writer = SpoolWriter(tmp_path / "spool", Position.of(FENCE))
    writer.append(shards.step(FENCE, end))
    writer.seal()
    target = sink.load_target(shards.schema.name)
    assert target is not None
    changes = shards.changes(target, SpoolReader(tmp_path / "spool"), FENCE, end)
    assert changes is not None
    sink.apply(target, changes, Position.of(end))

    found = ds.dataset(tmp_path / "log" / "lake" / "all", partitioning="hive").to_table().to_pylist()
    seen = sorted(
        (row["_commit_version"], row["_ordinal"], row["_change_type"], row[SOURCE]) for row in found
    )
    copied = [
        (FENCE, 0, "snapshot", f"s{at}.t") for at, member in enumerate(members) for _ in member.states[FENCE]
    ]
    logged = [
        (each.position, change.ordinal, change.kind.value, f"s{at}.t")
        for at, log in enumerate(shards.logs)
        for each in log
        for change in each.changes
    ]
    assert "truncate" in {kind for _, _, kind, _ in logged}
    assert seen == sorted(copied + logged)
