"""Spark, where it writes to Delta tables by itself: sessions that put the position into what they commit, and what went wrong in them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from penstock.errors import SinkError, SinkRefusedError, parse_error
from penstock.position import Position


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
        raise SinkError(f"{doing} {path}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
