"""Paths in a Delta log that lead out of the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from penstock.errors import FileOutsideTableError
from penstock.sinks.base import SHADOWS
from penstock.sinks.delta.deletion_vectors import table_file
from penstock.sinks.delta.sink import DeltaSink

OUTSIDE = [
    "../other/x.parquet",
    "a/../../other/x.parquet",
    "%2E%2E/other/x.parquet",
    "..%2Fother%2Fx.parquet",
    "{root}/../other/x.parquet",
    "file://{root}/../other/x.parquet",
    "file://{other}/x.parquet",
    "{other}/x.parquet",
    "linked/x.parquet",
    "link.parquet",
    "s3://bucket/x.parquet",
    "//host/x.parquet",
    "",
    ".",
    "a%00b",
    "//[x.parquet",
    "file://[x.parquet",
    "a\ud800.parquet",
    "_delta_log/00000000000000000000.json",
    "a/../_delta_log/00000000000000000000.json",
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("table", "table/a", "table/_delta_log", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "x.parquet").write_bytes(b"another table's")
    (tmp_path / "table" / "linked").symlink_to(tmp_path / "other")
    (tmp_path / "table" / "link.parquet").symlink_to(tmp_path / "other" / "x.parquet")
    return tmp_path / "table"


@pytest.mark.parametrize("uri", OUTSIDE)
def test_a_path_that_leads_out_of_the_table_is_refused(root: Path, uri: str) -> None:
    with pytest.raises(FileOutsideTableError):
        table_file(root, uri.format(root=root, other=root.parent / "other"))


@pytest.mark.parametrize(
    "name", ["x.parquet", "a/x.parquet", "a b/c#?.parquet", "..x.parquet", "day=1/x.parquet"]
)
def test_a_file_of_the_table_is_found_by_its_escaped_or_absolute_name(root: Path, name: str) -> None:
    absolute = root / name
    assert [
        table_file(root, uri)
        for uri in (quote(name), quote(str(absolute)), absolute.as_uri(), f"a/../{quote(name)}")
    ] == [absolute] * 4


def test_a_table_that_is_itself_reached_by_a_link_is_read(root: Path) -> None:
    (root.parent / "lake").symlink_to(root)
    assert table_file(root.parent / "lake", "x.parquet") == root.parent / "lake" / "x.parquet"


def test_a_table_with_a_broken_log_does_not_keep_a_run_from_dropping_the_shadow_of_a_killed_one(
    tmp_path: Path,
) -> None:
    table, shadow = tmp_path / "public" / "t", tmp_path / SHADOWS / "shop" / "copy" / "public" / "t"
    for each in (table, shadow):
        (each / "_delta_log").mkdir(parents=True)
    (shadow / "x.parquet").write_bytes(b"rows")
    (table / "x.parquet").hardlink_to(shadow / "x.parquet")
    (table / "_delta_log" / "00000000000000000000.json").write_bytes(b"{")
    no_spark: Any = None
    DeltaSink(no_spark, tmp_path, "shop").drop_shadows()
    assert not shadow.exists()
