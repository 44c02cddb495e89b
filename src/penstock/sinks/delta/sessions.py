"""Spark, where it writes to Delta tables by itself: sessions that put the position into what they commit, and what went wrong in them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from penstock.errors import SinkError, SinkRefusedError, ValuesRefusedError, foreign_reason, parse_error
from penstock.position import Position

_ROW = ("22001", "22003", "23")
"""SQLSTATEs and classes of them: a row has a value that its column, or a constraint, does not take."""
_TABLE = ("0A", "42809", "56038")
"""The table does not let itself be written to like that: it only takes appends, say, or asks for more than this Delta knows."""
_NAMES = ("constraintName", "columnName")
"""Which of the parameters of a message may be told. Others are values."""


class DeltaSessions:
    """The transaction id is a session setting: every table, known by it, has a session of its own. Used by several threads."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._sessions: dict[str, SparkSession] = {}
        self._lock = threading.Lock()

    def at(self, application: str, position: Position) -> SparkSession:
        """The table's session, set to write `position` with whatever is written next."""
        with self._lock:
            if application not in self._sessions:
                self._sessions[application] = self._spark.newSession()
            session = self._sessions[application]
        session.conf.set("spark.databricks.delta.write.txnAppId", application)
        session.conf.set("spark.databricks.delta.write.txnVersion", str(position.value))
        return session


@contextmanager
def failing(path: Path, doing: str) -> Iterator[None]:
    """Turn what Spark says of the table at `path` into an error of ours."""
    try:
        yield
    except AnalysisException as error:
        hint = "look at the message; removing the table copies it anew"
        raise SinkRefusedError(f"{doing} {path}: {first_line(error)}", hint=hint) from error
    except (PySparkException, Py4JJavaError) as error:
        found = parse_error(str(error))
        if isinstance(found, SinkError):
            raise type(found)(f"{doing} {path}: {found.message}", hint=f"remove {path} and run again to copy the table anew") from error
        state, what = _find_refusal(error)
        if state.startswith(_ROW):
            hint = (
                f"ALTER TABLE delta.`{path}` DROP CONSTRAINT …, or mend the row in the source; then penstock tables resync; "
                "or set refused: dead_letters, which puts such rows aside"
            )
            raise ValuesRefusedError(f"{doing} {path}: a row is refused: {what}", hint=hint) from None
        if state.startswith(_TABLE):
            hint = f"take that out of the table, or remove {path} and run again to copy it anew"
            raise SinkRefusedError(f"{doing} {path}: {what}", hint=hint) from error
        raise SinkError(f"{doing} {path}: {foreign_reason(error)}") from error


def _tells(state: str, error_class: str) -> bool:
    """Not what a task that writes wraps around it; nor what Delta has to say of versions, which it files under numbers out of range."""
    return state.startswith((*_ROW, *_TABLE)) and not (state == "22003" and error_class.startswith("DELTA_"))


def _find_refusal(error: BaseException) -> tuple[str, str]:
    """What Delta has against it: the SQLSTATE, empty if there is none, and the rule that says so. Its own words have the row in them."""
    java: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    while java is not None:
        try:
            state, parameters = java.getSqlState(), java.getMessageParameters()
            names = [str(parameters.get(name)) for name in _NAMES if parameters.get(name) is not None]
            if state is not None and _tells(str(state), str(java.getErrorClass())):
                return str(state), " ".join([str(java.getErrorClass()), *names])
        except Py4JError:
            pass  # one of Java's own, which has none of that
        java = java.getCause()
    return "", ""


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
