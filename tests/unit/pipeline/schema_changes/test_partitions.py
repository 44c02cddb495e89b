"""Partitions attached or detached with rows, by what was known of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.errors import SpoolCorruptError, SpoolFormatError
from penstock.pipeline.schema_changes.partitions import (
    ATTACHED,
    DETACHED,
    KnownPartitions,
    Verdict,
    changed_files,
    judge,
    load_partitions,
    moved_partitions,
    save_partitions,
)
from penstock.postgres.chunks import Partition, Partitions
from penstock.schema import TableName

TABLE = TableName("public", "t")
ROOT = 100
KNOWN = KnownPartitions({1: 1, 2: 20}, 700)


def parts(leaves: Mapping[int, int], xid: int = 710) -> Partitions:
    """By OID, where they lie."""
    return Partitions({oid: Partition(ROOT, filenode, xid) for oid, filenode in leaves.items()}, 720)


@pytest.mark.parametrize(
    ("known", "now", "reason"),
    [
        ({1, 2}, {1: False, 2: True}, None),
        ({1, 2}, {1: False, 2: False, 3: False}, None),
        ({1, 2}, {1: False, 2: False, 3: True}, ATTACHED),
        ({1, 2}, {1: False}, DETACHED),
        ({1, 2}, {1: False, 3: False}, DETACHED),
    ],
)
def test_S12_a_detached_partition_or_one_attached_with_rows_is_detected(
    known: set[int], now: dict[int, bool], reason: str | None
) -> None:
    found = {
        TABLE: Partitions(
            {oid: Partition(ROOT, oid, 700, is_attached) for oid, is_attached in now.items()}, 720
        )
    }
    assert moved_partitions({TABLE: KnownPartitions(dict.fromkeys(known, 0), 0)}, found) == (
        {} if reason is None else {TABLE: reason}
    )
    assert moved_partitions({}, found) == {}, "a partition that was unknown is accepted"


@pytest.mark.parametrize(
    ("now", "elsewhere"),
    [
        ({1: 1, 2: 20}, []),
        ({1: 30, 2: 20}, [1]),
        ({1: 1, 2: 20, 3: 3}, []),
        ({1: 1, 2: 20, 3: 30}, [3]),
    ],
    ids=["as before", "moved", "new", "new and moved since"],
)
def test_R12_a_part_that_does_not_lie_where_it_did_is_noticed(
    now: dict[int, int], elsewhere: list[int]
) -> None:
    assert list(changed_files(KNOWN, parts(now))) == elsewhere
    assert list(changed_files(KnownPartitions(dict.fromkeys(now, 0), 0), parts(now))) == [], (
        "their former parents are unknown"
    )


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ({1: True, 2: True}, Verdict.KEPT),
        ({1: True, 2: False}, Verdict.EMPTIED),
        ({1: False, 2: True}, Verdict.EMPTIED),
        ({1: True, 2: None}, Verdict.BUSY),
    ],
)
def test_R12_a_part_without_any_older_row_counts_as_emptied(
    answers: dict[int, bool | None], verdict: Verdict
) -> None:
    now = parts({1: 30, 2: 31})
    assert judge(KNOWN, now, (), lambda oid, part: answers[oid]) is verdict
    assert judge(KNOWN, now, {710}, lambda oid, part: False) is Verdict.KEPT, "the log has shown it"
    assert judge(KNOWN, now, {709}, lambda oid, part: False) is Verdict.EMPTIED, "the log has shown another"


def test_R12_a_partition_under_the_same_parent_is_not_read() -> None:
    def ask(oid: int, part: Partition) -> bool:
        raise AssertionError(oid)

    assert judge(KNOWN, parts({1: 1, 2: 20}), (), ask) is Verdict.KEPT


def test_S12_observations_are_kept_over_restarts(tmp_path: Path) -> None:
    assert load_partitions(tmp_path) == {}
    save_partitions(tmp_path, {TABLE: KNOWN})
    assert load_partitions(tmp_path) == {TABLE: KNOWN}
    file = tmp_path / "parts.json"
    file.write_text(json.dumps({"format": 3, "tables": {}}), encoding="utf-8")
    with pytest.raises(SpoolFormatError):
        load_partitions(tmp_path)
    file.write_text("no", encoding="utf-8")
    with pytest.raises(SpoolCorruptError):
        load_partitions(tmp_path)


def test_S12_observations_of_an_older_version_count(tmp_path: Path) -> None:
    (tmp_path / "parts.json").write_text(
        json.dumps({"format": 1, "tables": {str(TABLE): [1, 2]}}), encoding="utf-8"
    )
    assert load_partitions(tmp_path) == {TABLE: KnownPartitions({1: 0, 2: 0}, 0)}
