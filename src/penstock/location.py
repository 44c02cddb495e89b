"""Parse locations in the configuration: a path or a `file:` URL.

Penstock reads and writes every file through the local file system, so it rejects URLs of object stores and
remote file systems. Without this check, pathlib would turn `s3://bucket/lake` into a local directory called
`s3:`.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from penstock.errors import ConfigError

# pathlib reduces `s3://` to `s3:/`. A scheme has at least two letters: `c:/lake` is a path.
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?P<rest>/.*)", re.DOTALL)
_FILE = re.compile(r"file:(//(localhost)?(?=/))?(?P<path>/.*)", re.DOTALL | re.IGNORECASE)
_FIX = (
    "give the path of a directory that the driver and all executors can access under that path, such as "
    "/mnt/lake, or its URL, file:///mnt/lake"
)


def parse_location(location: str | Path) -> Path:
    """The path of a location: the location itself, or the path in a `file:` URL.

    Raises ValueError for any other URL; the message contains only its scheme, since the rest may be secret.
    """
    text = str(location)
    file = _FILE.fullmatch(text)
    if file is not None and not file["path"].startswith("//"):
        return Path(unquote(file["path"]))
    url = _URL.fullmatch(text)
    if url is None:
        return Path(text)
    scheme = url["scheme"].lower()
    if scheme == "file":
        raise ValueError("a file: URL that names another host is not supported: write file:///path")
    raise ValueError(
        f"{scheme}: URLs are not supported: object stores and remote file systems have to be mounted; {_FIX}"
    )


def absolute_path(location: str | Path, name: str) -> Path:
    """The absolute path of the setting `name`. Raises ConfigError for URLs other than `file:`.

    Call it where the setting is read: the program may change its working directory later, and tasks run in
    other directories.
    """
    try:
        return parse_location(location).absolute()
    except ValueError as error:
        raise ConfigError(f"{name}: {error}", hint=_FIX) from None
