"""Directories for tables, whatever the tables are called."""

from __future__ import annotations

import tempfile
from pathlib import Path
from urllib.parse import quote

from typing_extensions import override

from penstock.schema import TableName
from penstock.sinks.base import Targets


def directory_name(name: str) -> str:
    """Different names give different directories. The escape is a tilde, since delta-rs takes a percent sign in a path for its own."""
    escaped = quote(name, safe=" ").replace("~", "~7E").replace("%", "~")
    return f"~2E{escaped[1:]}" if escaped.startswith(".") else escaped


def tells_case_apart(directory: Path) -> bool:
    """Whether names in this directory, which is made if need be, may differ in case alone."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=".penstock-case-", dir=directory) as probe:
        path = Path(probe.name)
        return not path.with_name(path.name.swapcase()).exists()


class DirectoryTargets(Targets):
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
        return tells_case_apart(self._root)
