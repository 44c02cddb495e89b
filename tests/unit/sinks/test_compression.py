"""Which columns of a snapshot's files are compressed."""

from __future__ import annotations

import random
import uuid
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.sinks.row_files import writer_options

CHANCE = random.Random(3)
ROWS = 5000
TABLE = pa.table(
    {
        "id": pa.array(range(ROWS)),
        "reference": [str(uuid.UUID(int=CHANCE.getrandbits(128))) for _ in range(ROWS)],
        "noise": [CHANCE.randbytes(40) for _ in range(ROWS)],
        "note": [f"order number {number}" for number in range(ROWS)],
        "state": ["open", "closed"] * (ROWS // 2),
        "tags": pa.array([["red", "green"]] * ROWS),
        "_exact": pa.array([[("a.b", "x" * 9)]] * ROWS, pa.map_(pa.string(), pa.string())),
        "nothing": pa.nulls(ROWS, pa.string()),
        "a.b": ["dotted"] * ROWS,
    }
)


def test_only_columns_that_repeat_nothing_are_left_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "file.parquet"
    with pq.ParquetWriter(path, TABLE.schema, **writer_options(TABLE)) as writer:
        writer.write_table(TABLE)
    assert pq.read_table(path).equals(TABLE)
    group = pq.read_metadata(path).row_group(0)
    columns = [group.column(index) for index in range(group.num_columns)]
    assert {column.path_in_schema for column in columns if column.compression == "UNCOMPRESSED"} == {
        "reference",
        "noise",
    }
    assert {column.compression for column in columns} == {"UNCOMPRESSED", "ZSTD"}
