"""Describe exceptions of other libraries without repeating their messages, which may contain row values.

Only the class, Spark's error condition and, for a missing file, its path are safe to show in status and logs.
Java exceptions are recognized by their attributes, so that neither pyspark nor py4j is imported.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from penstock.errors import PenstockError

_CLASS = re.compile(
    r"(?:^(?:: )?|Caused by: |\): )((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Exception|Error))(?=[:\s]|$)", re.M
)
_CONDITION = re.compile(r"^(?:[\w.$]+: )?\[([A-Z][A-Z0-9_.]+)\]", re.M)
_MISSING = re.compile(
    r"FileNotFoundError|FileNotFoundException|NoSuchFileException|FILE_NOT_EXIST|DELTA_FILE_NOT_FOUND"
    r"|Failed to open local file"
)
_PATH = re.compile(
    r"(?:file:/{0,2}(?=/)|(?<![\w:/]))(/[^\s'\",;:]+\.(?:parquet|bin|avro|json|puffin|orc|crc))"
)
_FULL = re.compile(
    r"(?:Error|Exception|\[Errno \d+\])[^\n]{0,40}(?:No space left on device|Disk quota exceeded)", re.I
)
_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_MOST_CAUSES = 20


def describe(error: BaseException) -> str:
    """A description of the root cause without row values: its class or Spark's error condition, and the path
    of a missing file.

    An error of Penstock never contains a row value, so its whole text is returned.
    """
    if isinstance(error, PenstockError):
        return str(error)
    file = missing_file(error)
    if file is not None:
        return f"the file {file} is missing"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error)
    condition = _CONDITION.search(text)
    if condition is not None:
        return condition[1]
    if _is_java(error):
        classes = _CLASS.findall(text)
        return str(classes[-1]) if classes else type(error).__name__
    return type(error).__name__


def missing_file(error: BaseException) -> str | None:
    """The path of the missing file, if the error or one of its causes reports one; otherwise None."""
    for each in causes(error):
        if isinstance(each, FileNotFoundError) and each.filename is not None:
            return str(each.filename)
        if isinstance(each, FileNotFoundError) or _is_java(each):
            text = str(each)
            found = _MISSING.search(text)
            path = _PATH.search(text, found.start()) or _PATH.search(text) if found is not None else None
            if path is not None:
                return str(PurePosixPath(path[1]))
    return None


def is_disk_full(error: BaseException) -> bool:
    """Whether a disk or quota is full, on this machine or on an executor."""
    for each in causes(error):
        if isinstance(each, OSError) and each.errno in _FULL_ERRNOS:
            return True
        if _is_java(each) and _FULL.search(str(each)):
            return True
    return False


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its chain of causes (`__cause__`)."""
    found: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if found is None:
            return
        yield found
        found = found.__cause__


def _is_java(error: BaseException) -> bool:
    """Whether the exception comes from the JVM. py4j and pyspark store the Java exception in these
    attributes.
    """
    return (
        getattr(error, "java_exception", None) is not None
        or getattr(error, "_origin", None) is not None
        or _is_pyspark(error)
    )


def _is_pyspark(error: BaseException) -> bool:
    return type(error).__module__.startswith(("pyspark.", "py4j."))
