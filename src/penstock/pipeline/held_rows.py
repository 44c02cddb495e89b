"""Rows that were in dead letters at some position: there, source and target are not the same, and it is known why.

They are told by their keys. Of a table without one, letters cannot be told from rows that are just missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.change import COMMIT_VERSION, EXACT, EXACT_TYPE, ORDINAL
from penstock.errors import RowRefusedError, SnapshotLostError, SpoolCorruptError
from penstock.pipeline.letters.letter import LetterStatus
from penstock.pipeline.letters.screening import Name
from penstock.pipeline.letters.store import LetterStore
from penstock.position import Position
from penstock.postgres.routed import is_same_shape
from penstock.schema import TableSchema
from penstock.sinks.keys import key_codes
from penstock.spool.range import FileSlice
from penstock.spool.rows import metadata_column, read_rows

_MAX_ROWS, _MAX_BYTES = 65_536, 64 << 20


def load_held(store: LetterStore, source: TableSchema, fence: Position | None = None) -> pa.Table:
    """The keys of letters that were open at `fence`, or are now: the key's columns as the source has them, and `_exact`.

    `SnapshotLostError` if one was settled since, and is gone. Letters of another shape of the table are not looked at.
    """
    schema = pa.schema([*(pa.field(name, _types(source)[name]) for name in source.key), pa.field(EXACT, EXACT_TYPE)])
    wanted = _open_at(store.load(), source, fence) if source.key else set()
    if not wanted:
        return schema.empty_table()
    try:
        slices = store.slices(source.name, fence or Position.ZERO)
        found = [keys for slice in slices for keys in _keys(slice, source, wanted)]
    except SpoolCorruptError as error:
        raise SnapshotLostError(f"letters of {source.name} were settled while it was to be compared") from error
    if wanted - store.open_names(source.name):
        raise SnapshotLostError(f"letters of {source.name} were settled while it was to be compared")
    return pa.concat_tables([schema.empty_table(), *(pa.table(keys, schema=schema) for keys in found)])


def check_held(source: TableSchema, refused: Sequence[Path], held: pa.Table) -> None:
    """`RowRefusedError` if not all rows that cannot be made the target's, in files, are among those that are held."""
    names = [*source.key, EXACT]
    rows = pa.concat_tables([held.slice(0, 0), *(pq.read_table(path, columns=names).cast(held.schema) for path in refused)])
    mine, theirs = key_codes([rows, held], source.key)
    count = int((~np.isin(mine, theirs)).sum())
    if count:
        raise RowRefusedError(
            f"{count:,} rows of {source.name} cannot be transformed, and are not in dead letters",
            hint=f"copy the table anew: penstock tables resync CONFIG {source.name}",
        )


def _open_at(letters: pa.Table, source: TableSchema, fence: Position | None) -> set[Name]:
    is_open = pc.equal(letters.column("status"), LetterStatus.OPEN.value)
    if fence is not None:
        since = pc.fill_null(pc.greater(letters.column("settled_version"), fence.value), fill_value=False)
        is_open = pc.and_(pc.or_(is_open, since), pc.less_equal(letters.column("commit_version"), fence.value))
    chosen = letters.filter(pc.and_(is_open, pc.equal(letters.column("table"), str(source.name))))
    return set(zip(*(chosen.column(name).to_pylist() for name in ("commit_version", "ordinal")), strict=True))


def _keys(slice: FileSlice, source: TableSchema, wanted: set[Name]) -> Iterator[list[pa.Array]]:
    shape = slice.file.schema
    constant = _constant(shape, source)
    if constant is None:
        return
    for batch in read_rows(slice, _MAX_ROWS, _MAX_BYTES):
        names = zip(*(metadata_column(batch, slice, name).to_pylist() for name in (COMMIT_VERSION, ORDINAL)), strict=True)
        kept = batch.filter(pa.array([name in wanted for name in names], pa.bool_()))
        columns = {column.name: kept.column(at) for at, column in enumerate(shape.columns)}
        columns |= {name: pa.repeat(pa.scalar(text, pa.string()), kept.num_rows) for name, text in constant.items()}
        yield [*(columns[name] for name in source.key), metadata_column(kept, slice, EXACT)]


def _constant(shape: TableSchema, source: TableSchema) -> dict[str, str] | None:
    """What all letters of this shape have in columns of the key that are not theirs; None: they are of another shape than the table."""
    if source.members is not None:
        is_member = any(is_same_shape(shape, member) for member in source.members.schemas)
        return {source.members.source_column: str(shape.name)} if is_member else None
    types, mine = _types(shape), _types(source)
    is_same = shape.oid == source.oid and all(types.get(name) == mine[name] for name in source.key)
    return {} if is_same else None


def _types(schema: TableSchema) -> dict[str, pa.DataType]:
    return {column.name: column.arrow_type for column in schema.columns}
