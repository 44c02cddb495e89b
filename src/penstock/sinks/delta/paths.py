"""Paths in a Delta log, as files of the table.

Anybody who may write to the table's directory may write any path into its log. Every path is checked here before the file is opened or
removed: it must be inside the table's directory, outside of `_delta_log`, and reached without a symbolic link below that directory.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from penstock.errors import FileOutsideTableError

_LOG = "_delta_log"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=-]*")


def name_in_table(root: Path, uri: str) -> str:
    """The normalised path, relative to the table at `root`, of the file that the log calls `uri`. Looks at no file."""
    if _PLAIN.fullmatch(uri):  # nearly all are, and a table may have a hundred thousand
        return uri
    try:
        parts = urlsplit(uri)
        uri.encode()
    except ValueError:  # no URL, or no text that a file can be called
        raise _refused(root) from None
    if parts.scheme not in ("", "file") or parts.netloc:
        raise _refused(root)
    # In a relative name, `?` and `#` are escaped, so that only a URL is split.
    path = os.path.normpath(os.path.join(root, unquote(parts.path if parts.scheme else uri)))  # noqa: PTH118 `Path` keeps `..`
    base = Path(os.path.normpath(root))
    if not Path(path).is_relative_to(base) or "\0" in path:
        raise _refused(root)
    name = Path(path).relative_to(base)
    if not name.parts or name.parts[0] == _LOG:
        raise _refused(root)
    return str(name)


def table_file(root: Path, uri: str) -> Path:
    """The file of the table at `root` that its log calls `uri`; `FileOutsideTableError` if it is not a file of that table."""
    name = name_in_table(root, uri)
    real = root.resolve() / name
    if real.resolve() != real:
        raise _refused(root)
    return root / name


def _refused(root: Path) -> FileOutsideTableError:
    return FileOutsideTableError(
        f"the log of the Delta table at {root} names a file that is not inside the table's directory",
        hint=f"find out who wrote the log; then remove {root} and run again to copy the table (of a shallow clone, make a deep one)",
    )
