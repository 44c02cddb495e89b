"""How a snapshot's Parquet files are compressed, by column.

zstd at its fastest takes the time of snappy and half the room. Only a column in which nothing repeats, of UUIDs or of what is compressed or
encrypted already, costs it more time than all others together; such a column is left as it is, which is what snappy makes of it.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_SAMPLE_BYTES = 64 << 10
_WORTH_IT = 0.9

# A dictionary that outgrows its limit is given up: beyond a few thousand values it costs more time than it saves room.
_DICTIONARY_BYTES = 32 << 10


def writer_options(sample: pa.Table) -> dict[str, Any]:
    """For a `ParquetWriter`, by what the first rows are like."""
    plain = {name for name in sample.column_names if _repeats_nothing(sample.column(name))}
    compressed = [path for path in _leaf_paths(sample.schema) if path not in plain]
    return {
        "compression": dict.fromkeys(compressed, "zstd") | dict.fromkeys(plain, "none"),
        "compression_level": dict.fromkeys(compressed, 1),
        "dictionary_pagesize_limit": _DICTIONARY_BYTES,
    }


def _repeats_nothing(column: pa.ChunkedArray) -> bool:
    """By the word of a codec that finds repetitions, and nothing else, very quickly."""
    if not (pa.types.is_string(column.type) or pa.types.is_binary(column.type)) or not column.num_chunks:
        return False
    octets = column.chunk(0).buffers()[2]
    if octets is None or octets.size < _SAMPLE_BYTES:
        return False
    sample = octets.slice(0, _SAMPLE_BYTES)
    return bool(pa.compress(sample, "lz4_raw").size > _WORTH_IT * sample.size)


def _leaf_paths(schema: pa.Schema) -> list[str]:
    """The columns as Parquet counts them: each part of a nested one by itself."""
    leaves = as_written(schema).schema
    return [leaves.column(index).path for index in range(len(leaves.names))]


def as_written(schema: pa.Schema) -> pq.ParquetFile:
    """A file of these columns, in memory."""
    file = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), file)
    return pq.ParquetFile(pa.BufferReader(file.getvalue()))
