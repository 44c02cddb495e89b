"""Directories for tables, whatever the tables are called."""

from __future__ import annotations

import tempfile
from pathlib import Path
from urllib.parse import quote

from typing_extensions import override

from penstock.errors import UnsupportedTableError
from penstock.schema import TableName
from penstock.sinks.base import SHADOWS, Targets

EPOCHS = "penstock_epochs"
DEAD_LETTERS = "penstock_dead_letters"
SNAPSHOTS = "penstock_snapshots"
SCRATCH = "penstock_scratch"
READS = "penstock_reads"
RESERVED = frozenset({EPOCHS, DEAD_LETTERS, SNAPSHOTS, SCRATCH, READS, SHADOWS})
"""Directories of pipelines beside the directories of schemas. A schema of such a name would be written into them."""


def reserved_schema(table: TableName) -> UnsupportedTableError | None:
    """Why a table of this schema cannot go to a lake; None if it can."""
    if table.schema.casefold() not in RESERVED:
        return None
    return UnsupportedTableError(
        f"table {table} cannot be mirrored: the target has a directory {table.schema} for the pipelines' own files",
        hint="route the table to another schema with into: in a rule of its own, rename the schema at the source, or exclude it",
    )


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
