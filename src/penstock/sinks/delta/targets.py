"""Delta tables as they stand, looked at without Spark: where each one is, and how far."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import override

from penstock.schema import TableName
from penstock.sinks.base import Target, Targets
from penstock.sinks.delta.log import load_target
from penstock.sinks.directories import directory_name, folds_case


class DeltaTargets(Targets):
    """The tables that one pipeline has under `root`, a directory each."""

    def __init__(self, root: Path, pipeline: str) -> None:
        self._root = root
        self._pipeline = pipeline

    def path(self, table: TableName) -> Path:
        return self._root / directory_name(table.schema) / directory_name(table.name)

    @override
    def describe(self, table: TableName) -> str:
        return str(self.path(table))

    @override
    def tells_apart(self, one: TableName, other: TableName) -> bool:
        self._root.mkdir(parents=True, exist_ok=True)
        return not folds_case(self._root)

    @override
    def load_target(self, table: TableName) -> Target | None:
        return load_target(self.path(table), self._pipeline, table)
