"""K08: files of former versions are read; files of later versions are refused with an error that names the
fix.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError, Recovery
from penstock.pipeline.epoch_log import EpochLog
from penstock.pipeline.sources.resume_checks import load_memberships
from penstock.pipeline.table_overrides import load_overrides
from penstock.pipeline.table_states import TableState
from penstock.position import Position
from penstock.postgres.membership import Membership
from penstock.schema import TableName
from penstock.sinks.modes import Mode
from penstock.sinks.parquet.targets import ParquetTargets
from penstock.spool.manifest import parse_manifest

ITEMS = TableName("public", "items")

# As the first version of each wrote it. These texts never change: such files exist on disks.
EPOCH = {
    "format": 1,
    "epoch": 7,
    "position": "0/64",
    "commit_time": "2026-01-02T03:04:05+00:00",
    "system": "42/1",
    "tables": {
        "public.items": {
            "state": "streaming",
            "applied": "0/64",
            "committed": "0/60",
            "reason": None,
            "remedy": None,
        }
    },
}
ORDERS = {"format": 1, "added": [], "removed": ["public.old"], "paused": [], "resync": ["public.items"]}
MEMBERSHIPS = {"format": 1, "tables": {"public.items": "16400/all"}}
PARQUET = {
    "format": 1,
    "pipeline": "shop",
    "source_oid": 5,
    "key": ["id"],
    "columns": [["id", "int64"]],
    "copy": ".x",
    "counts": True,
}
MANIFEST = {
    "format": 1,
    "start": "0/0",
    "end": "0/64",
    "transactions": 1,
    "commit_time": "2026-01-02T03:04:05+00:00",
    "files": [],
}


def _epochs(root: Path) -> object:
    return EpochLog(root, "shop").last()


def _parquet(root: Path) -> object:
    return ParquetTargets(root, "shop").load_target(ITEMS)


Read = Callable[[Path], object]
DOCUMENTS: list[tuple[str, dict[str, Any], Read]] = [
    ("penstock_epochs/shop/0000000000000064.json", EPOCH, _epochs),
    ("tables.json", ORDERS, load_overrides),
    ("membership.json", MEMBERSHIPS, load_memberships),
    ("public/items/_penstock.json", PARQUET, _parquet),
]
each = pytest.mark.parametrize(
    ("name", "document", "read"), DOCUMENTS, ids=[name for name, _, _ in DOCUMENTS]
)


def _put(root: Path, name: str, document: object) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(json.dumps(document) + "\n", encoding="utf-8")


@each
def test_K08_files_of_a_newer_version_are_refused_by_name(
    tmp_path: Path, name: str, document: dict[str, Any], read: Read
) -> None:
    _put(tmp_path, name, {**document, "format": 99})
    with pytest.raises(PenstockError, match="has format 99") as refused:
        read(tmp_path)
    assert refused.value.recovery is Recovery.OPERATOR
    assert "newer" in (refused.value.hint or "")


@each
def test_K08_damaged_files_are_distinguished_from_later_versions(
    tmp_path: Path, name: str, document: dict[str, Any], read: Read
) -> None:
    documents: list[object] = [[], {**dict.fromkeys(document, 7), "format": document["format"]}]
    for broken in documents:
        _put(tmp_path, name, broken)
        with pytest.raises(PenstockError) as refused:
            read(tmp_path)
        assert refused.value.recovery is Recovery.OPERATOR
        assert refused.value.hint
        assert "newer" not in refused.value.hint


def test_K08_files_of_the_first_versions_are_read(tmp_path: Path) -> None:
    for name, document, _ in DOCUMENTS:
        _put(tmp_path, name, document)
    last = EpochLog(tmp_path, "shop").last()
    assert last is not None
    assert (last.number, last.position, last.tables[ITEMS].state) == (
        7,
        Position.of(100),
        TableState.STREAMING,
    )
    orders = load_overrides(tmp_path)
    assert (orders.removed, orders.resync) == (frozenset({TableName("public", "old")}), frozenset({ITEMS}))
    assert load_memberships(tmp_path) == {ITEMS: Membership(None, "16400/all")}
    target = ParquetTargets(tmp_path, "shop").load_target(ITEMS)
    assert target is not None
    assert (target.key, target.mode, target.applied) == (("id",), Mode.APPEND, None)
    manifest = parse_manifest(json.dumps(MANIFEST).encode(), where="the segment")
    assert (manifest.end, manifest.messages) == (Position.of(100), ())
