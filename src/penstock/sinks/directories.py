"""Names of directories for tables, whatever the tables are called."""

from __future__ import annotations

import tempfile
from pathlib import Path
from urllib.parse import quote


def directory_name(name: str) -> str:
    """Different names give different directories. The escape is a tilde, since delta-rs takes a percent sign in a path for its own."""
    escaped = quote(name, safe=" ").replace("~", "~7E").replace("%", "~")
    return f"~2E{escaped[1:]}" if escaped.startswith(".") else escaped


def folds_case(directory: Path) -> bool:
    """Whether names in this directory that differ only in case are one and the same."""
    with tempfile.NamedTemporaryFile(prefix=".penstock-case-", dir=directory) as probe:
        path = Path(probe.name)
        return path.with_name(path.name.swapcase()).exists()
