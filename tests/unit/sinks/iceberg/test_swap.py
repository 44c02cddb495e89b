"""When the shadow of an Iceberg table is swapped in by metadata alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.sinks.iceberg.state import COPY
from penstock.sinks.iceberg.swap import plan_swap


class _Asked(Exception):
    """Raised when the files of the shadow are requested."""


class _Table(SimpleNamespace):
    @property
    def format_version(self) -> int:
        raise _Asked


def test_files_that_a_lost_commit_has_put_in_place_are_not_removed_and_added_by_another() -> None:
    """Iceberg would delete them when the snapshot of that other commit expires."""
    shadow: Any = _Table(properties={COPY: "second"})
    nothing: Any = None
    asked = []
    for copy in ("first", "second"):
        table: Any = _Table(properties={COPY: copy})
        try:
            assert plan_swap(nothing, nothing, shadow, table) is None
        except _Asked:
            asked.append(copy)
    assert asked == ["first"], "Spark writes new files in the other case"
