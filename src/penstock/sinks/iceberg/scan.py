"""Which files of an Iceberg table may hold rows that are looked for, by Iceberg's own planning, and which deletes they are read with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.sinks.iceberg.catalog import LoadedTable, failing, local_path
from penstock.sinks.iceberg.lookup import HeldFile

_FEW = 200
"""Iceberg looks into no longer list of values, to leave out files."""
_FORMAT = 2
_SUFFIX = ".parquet"
_BY_VALUES = "EQUALITY_DELETES"


def plan_scan(
    jvm: Any, loaded: LoadedTable, keys: Mapping[str, pa.ChunkedArray], snapshot: int | None = None
) -> tuple[list[HeldFile], list[HeldFile]] | None:
    """Files of rows that may have one of `keys` in the columns of these names, and all files of deletes; of the newest snapshot by default.

    None: not all of them are of a kind that we write ourselves.
    """
    if loaded.format_version != _FORMAT or loaded.problem is not None:
        return None
    if loaded.delete_files is None:
        return [], []
    with failing(f"looking for rows in {loaded.location}"):
        scan = loaded.java.newScan() if snapshot is None else loaded.java.newScan().useSnapshot(snapshot)
        scan = scan.filter(_within(jvm, keys)).ignoreResiduals()
        with closing(scan.planFiles()) as tasks:
            files = [_row_file(task.file()) for task in each(tasks.iterator())]
        deletes = [_delete_file(file) for file in delete_files(jvm, loaded, snapshot)]
    known = [file for file in (*files, *deletes) if file is not None]
    if len(known) < len(files) + len(deletes):
        return None
    return known[: len(files)], known[len(files) :]


def delete_files(jvm: Any, loaded: LoadedTable, snapshot: int | None = None) -> Iterator[Any]:
    """Those of a snapshot, or the current one, as Java has them."""
    io, specs = loaded.java.io(), loaded.java.specs()
    found = loaded.java.currentSnapshot() if snapshot is None else loaded.java.snapshot(snapshot)
    for manifest in each(found.deleteManifests(io).iterator()):
        with closing(jvm.org.apache.iceberg.ManifestFiles.readDeleteManifest(manifest, io, specs)) as reader:
            yield from each(reader.iterator())


def each(iterator: Any) -> Iterator[Any]:
    while iterator.hasNext():
        yield iterator.next()


def _row_file(file: Any) -> HeldFile | None:
    location, sequence = str(file.location()), file.dataSequenceNumber()
    return HeldFile(str(local_path(location)), int(sequence)) if location.endswith(_SUFFIX) and sequence is not None else None


def _delete_file(file: Any) -> HeldFile | None:
    location, sequence = str(file.location()), file.dataSequenceNumber()
    if not location.endswith(_SUFFIX) or sequence is None or str(file.content()) != _BY_VALUES:
        return None
    return HeldFile(str(local_path(location)), int(sequence), tuple(int(number) for number in file.equalityFieldIds()))


def _within(jvm: Any, keys: Mapping[str, pa.ChunkedArray]) -> Any:
    """What lets files be left out by their bounds."""
    expressions = jvm.org.apache.iceberg.expressions.Expressions
    found = expressions.alwaysTrue()
    for name, values in keys.items():
        kind = values.type
        if values.null_count or not len(values) or not (pa.types.is_integer(kind) or pa.types.is_string(kind)):
            continue
        within = _among(jvm, name, pc.unique(values))
        found = getattr(expressions, "and")(found, within)
    return found


def _among(jvm: Any, name: str, values: pa.Array) -> Any:
    expressions = jvm.org.apache.iceberg.expressions.Expressions
    if len(values) <= _FEW:
        listed = jvm.java.util.ArrayList()
        for value in values.to_pylist():
            listed.add(value)
        return getattr(expressions, "in")(name, listed)
    bounds = pc.min_max(values).as_py()
    low, high = expressions.greaterThanOrEqual(name, bounds["min"]), expressions.lessThanOrEqual(name, bounds["max"])
    return getattr(expressions, "and")(low, high)
