"""Delta tables as they stand, looked at without Spark: where each one is, and how far."""

from __future__ import annotations

from typing_extensions import override

from penstock.schema import TableName
from penstock.sinks.base import Target
from penstock.sinks.delta.log import load_target
from penstock.sinks.directories import DirectoryTargets


class DeltaTargets(DirectoryTargets):
    @override
    def load_target(self, table: TableName) -> Target | None:
        return load_target(self.path(table), self._pipeline, table)
