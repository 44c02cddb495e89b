"""Write Delta checkpoints: the state of the log in one Parquet file, so that readers need not read the log
from its beginning.

Penstock writes a checkpoint from the loaded state within milliseconds. Delta would run several Spark jobs,
which take seconds. Delta still writes the checkpoints of tables that Penstock does not fully support.

A checkpoint also lists removed files that older versions still use, so that VACUUM keeps these files. The
list comes from the previous checkpoint and the commits since then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from penstock import storage
from penstock.sinks.delta.state import DeltaState, Unsupported, check_writable, checkpoint_parts, commit_file

_TEXTS = pa.map_(pa.string(), pa.string())
_VECTOR = pa.struct(
    {
        "storageType": pa.string(),
        "pathOrInlineDv": pa.string(),
        "offset": pa.int32(),
        "sizeInBytes": pa.int32(),
        "cardinality": pa.int64(),
        "maxRowIndex": pa.int64(),
    }
)
_KINDS = {
    "txn": pa.struct({"appId": pa.string(), "version": pa.int64(), "lastUpdated": pa.int64()}),
    "add": pa.struct(
        {
            "path": pa.string(),
            "partitionValues": _TEXTS,
            "size": pa.int64(),
            "modificationTime": pa.int64(),
            "dataChange": pa.bool_(),
            "tags": _TEXTS,
            "deletionVector": _VECTOR,
            "baseRowId": pa.int64(),
            "defaultRowCommitVersion": pa.int64(),
            "clusteringProvider": pa.string(),
            "stats": pa.string(),
        }
    ),
    "remove": pa.struct(
        {
            "path": pa.string(),
            "deletionTimestamp": pa.int64(),
            "dataChange": pa.bool_(),
            "size": pa.int64(),
            "deletionVector": _VECTOR,
        }
    ),
    "metaData": pa.struct(
        {
            "id": pa.string(),
            "name": pa.string(),
            "description": pa.string(),
            "format": pa.struct({"provider": pa.string(), "options": _TEXTS}),
            "schemaString": pa.string(),
            "partitionColumns": pa.list_(pa.string()),
            "configuration": _TEXTS,
            "createdTime": pa.int64(),
        }
    ),
    "protocol": pa.struct(
        {
            "minReaderVersion": pa.int32(),
            "minWriterVersion": pa.int32(),
            "readerFeatures": pa.list_(pa.string()),
            "writerFeatures": pa.list_(pa.string()),
        }
    ),
    "domainMetadata": pa.struct({"domain": pa.string(), "configuration": pa.string(), "removed": pa.bool_()}),
}
_STATS_AS_JSON = "delta.checkpoint.writeStatsAsJson"
_STATS_AS_STRUCT = "delta.checkpoint.writeStatsAsStruct"
_HINT = "_last_checkpoint"
_MARK = b"penstock.stamped_ms"
"""Metadata key that only Penstock's checkpoints have. Its value is a time in milliseconds. Files that were
removed after this time are listed with the time of the commit that removed them. Files that were removed
before may be listed with the time at which that commit began, because Delta records that time.
"""
_BEGAN_MS = 3_600_000
"""The longest time that a commit by another writer may take."""


def write_checkpoint(path: Path, state: DeltaState, since_ms: int) -> None:
    """Write the checkpoint of `state`, unless it exists. It lists the files that were removed since
    `since_ms`.

    Raises `Unsupported` if only Delta can write it.
    """
    check_writable(state)
    properties = state.metadata.properties
    if (
        properties.get(_STATS_AS_JSON, "true").lower() != "true"
        or properties.get(_STATS_AS_STRUCT, "false").lower() != "false"
    ):
        raise Unsupported("its checkpoints store statistics in an unsupported format")
    log, target = path / "_delta_log", checkpoint_file(path, state.version)
    if storage.exists(target):
        return
    gone, domains, stamped_ms = _load_past(path, state.version, since_ms)
    adds = _array(
        "add", ({"partitionValues": {}, **file.action, "dataChange": False} for file in state.files.values())
    )
    parts = {
        "protocol": _array("protocol", [state.protocol]),
        "metaData": _array("metaData", [state.metadata.action]),
        "txn": _array(
            "txn", ({"appId": name, "version": version} for name, version in state.transactions.items())
        ),
        "domainMetadata": _array("domainMetadata", domains),
        "remove": gone.filter(pc.invert(pc.is_in(_keys(gone), _keys(adds)))),
        "add": adds,
    }
    rows = pa.concat_tables(
        [pa.table({kind: part}) for kind, part in parts.items()], promote_options="default"
    ).select(list(_KINDS))
    if _put(rows, target, stamped_ms):
        _leave_hint(log, state.version, rows.num_rows, storage.size_bytes(target), len(adds))


def is_ours(path: Path, version: int) -> bool:
    """Whether `version` has a checkpoint that Penstock wrote."""
    try:
        return _stamped_ms(pq.read_metadata(checkpoint_file(path, version))) is not None
    except (OSError, pa.ArrowException):
        return False


def checkpoint_file(path: Path, version: int) -> Path:
    return path / "_delta_log" / f"{version:020d}.checkpoint.parquet"


def _put(rows: pa.Table, target: Path, stamped_ms: int) -> bool:
    """Write `rows` to the checkpoint file `target`. Returns False if Delta has written that checkpoint since.
    Then Delta's file stays, because a checksum file of Hadoop belongs to it.
    """
    written = target.with_name(f".penstock-{uuid4().hex}.tmp")
    try:
        with pq.ParquetWriter(written, rows.schema, store_schema=False) as writer:
            writer.write_table(rows)
            writer.add_key_value_metadata({_MARK: str(stamped_ms)})
        storage.sync_file(written)
        is_new = storage.link(written, target)
    except storage.LinksUnsupportedError as error:
        raise Unsupported("its file system has no hard links") from error
    finally:
        storage.delete(written)
    storage.sync_directory(target.parent)
    return is_new


def _stamped_ms(metadata: pq.FileMetaData) -> int | None:
    """The time in milliseconds that Penstock stamped into the checkpoint (see `_MARK`); None if another
    writer made the checkpoint.
    """
    found = (metadata.metadata or {}).get(_MARK)
    return None if found is None else int(found)


def write_checkpoint_by_delta(spark: SparkSession, path: Path) -> None:
    """Let Delta write a checkpoint of the current version. Delta does not report a failure."""
    jvm = spark._jvm  # noqa: SLF001 Delta has no other access to its log
    assert jvm is not None
    nothing = getattr(getattr(jvm.scala, "None$"), "MODULE$")
    log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, str(path))  # noqa: SLF001
    log.checkpoint(log.update(False, nothing, nothing), nothing)


def _leave_hint(log: Path, version: int, actions: int, size: int, files: int) -> None:
    """Write `_last_checkpoint`, which tells readers where to start. Also remove the checksum file that Delta
    wrote for the previous `_last_checkpoint`.
    """
    found = storage.read(log / _HINT)
    try:
        is_newer = found is not None and json.loads(found)["version"] >= version
    except (ValueError, KeyError, TypeError):
        is_newer = False
    if not is_newer:
        hint = {"version": version, "size": actions, "sizeInBytes": size, "numOfAddFiles": files}
        storage.delete(log / f".{_HINT}.crc")
        storage.put(log / _HINT, json.dumps(hint).encode(), shared=True)


def _load_past(
    path: Path, version: int, since_ms: int
) -> tuple[pa.StructArray, list[Mapping[str, Any]], int]:
    """Return three facts from the log up to `version`: the files that were removed since `since_ms`, each
    once and the newest last; the table's domains; and the time from which removal times are commit times (see
    `_MARK`).
    """
    log = path / "_delta_log"
    begun, names = checkpoint_parts(storage.list_files(log), version)
    found: dict[str, Mapping[str, Any]] = {}
    domains: dict[str, Mapping[str, Any]] = {}
    older, stamped_ms = [_array("remove", [])], 0
    for name in names:
        file = pq.ParquetFile(log / name)
        known_ms = _stamped_ms(file.metadata)
        stamped_ms = max(stamped_ms, _written_ms(log / name) if known_ms is None else known_ms)
        for kind in {"remove", "domainMetadata"} & set(file.schema_arrow.names):
            rows = file.read([kind]).column(kind).combine_chunks().drop_null()
            if kind == "remove":
                older.append(_fitted(rows, _KINDS[kind]))
            else:
                domains |= {each["domain"]: each for each in rows.to_pylist()}
    for number in range(begun + 1, version + 1):
        data, committed_ms = storage.read(commit_file(path, number)), _written_ms(commit_file(path, number))
        if data is None:
            raise Unsupported("commits are missing after its newest checkpoint")
        for action in _actions(data):
            if "remove" in action:
                removed = {
                    **action["remove"],
                    "deletionTimestamp": max(action["remove"].get("deletionTimestamp") or 0, committed_ms),
                }
                vector = removed.get("deletionVector") or {}
                found[
                    json.dumps(
                        [removed["path"], *map(vector.get, ("storageType", "pathOrInlineDv", "offset"))]
                    )
                ] = removed
            elif "domainMetadata" in action:
                domains[action["domainMetadata"]["domain"]] = action["domainMetadata"]
    newer = _array("remove", ({**each, "dataChange": False} for each in found.values()))
    past = pa.concat_arrays(older)
    past = pa.concat_arrays([past.filter(pc.invert(pc.is_in(_keys(past), _keys(newer)))), newer])
    from_ms = since_ms - _BEGAN_MS if stamped_ms > since_ms else since_ms
    since = pc.greater_equal(pc.fill_null(pc.struct_field(past, "deletionTimestamp"), 0), from_ms)
    return past.filter(since), [each for each in domains.values() if not each.get("removed")], stamped_ms


def _written_ms(file: Path) -> int:
    mark = storage.file_version(file)
    return 0 if mark is None else mark.modified_ns // 1_000_000


def _actions(data: bytes) -> Iterator[Mapping[str, Any]]:
    return (
        json.loads(line) for line in data.splitlines() if b'"remove"' in line or b'"domainMetadata"' in line
    )


def _keys(files: pa.StructArray) -> pa.Array:
    """A text for each file that identifies one state of it: its path and its deletion vector."""
    parts = [
        pc.struct_field(files, ["deletionVector", name]).cast(pa.string())
        for name in ("storageType", "pathOrInlineDv", "offset")
    ]
    return pc.binary_join_element_wise(
        pc.struct_field(files, "path"), *(pc.fill_null(part, "") for part in parts), "\n"
    )


def _array(kind: str, actions: Iterable[Mapping[str, Any]]) -> pa.StructArray:
    return pa.array([_value(action, _KINDS[kind]) for action in actions], _KINDS[kind])


def _value(found: Any, wanted: pa.DataType) -> Any:
    """A value in the form Arrow accepts: structs without unknown fields, maps as pairs."""
    if found is None:
        return None
    if pa.types.is_map(wanted):
        return list(found.items())
    if pa.types.is_struct(wanted):
        return {field.name: _value(found.get(field.name), field.type) for field in wanted}
    return found


def _fitted(found: pa.StructArray, wanted: pa.DataType) -> pa.StructArray:
    """A struct with exactly the `wanted` fields, null where missing."""
    names = {field.name for field in found.type}
    parts = []
    for field in wanted:
        part = found.field(field.name) if field.name in names else pa.nulls(len(found), field.type)
        parts.append(
            _fitted(part, field.type)
            if pa.types.is_struct(field.type) and field.name in names
            else part.cast(field.type)
        )
    return pa.StructArray.from_arrays(parts, fields=list(wanted), mask=found.is_null())
