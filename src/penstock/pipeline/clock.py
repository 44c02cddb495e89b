"""The streaming query that is a pipeline's clock: where a batch of it ends, and what ended the query itself."""

from __future__ import annotations

import json
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from penstock.errors import WorkerStartError, parse_error
from penstock.position import Position

_LOST_WORKER = (
    "Python worker failed to connect back",
    "Python worker exited unexpectedly",
    "Broken pipe",
    "EOFException",
    "Connection reset",
)


def await_end(query: StreamingQuery) -> None:
    """Raise what ended the query, as an error of ours where it is one."""
    try:
        query.awaitTermination()
    except PySparkException as error:
        found = parse_error(str(error))
        if found is None and any(words in str(error) for words in _LOST_WORKER):
            found = WorkerStartError("a Python process of Spark's ended, or did not start within the time that Spark gives it")
        if found is None:
            raise
        raise found from error


def planned_end(checkpoint: Path, batch: int) -> Position:
    """The end of a batch, from the offset log that Spark wrote before it began."""
    lines = (checkpoint / "offsets" / str(batch)).read_text(encoding="utf-8").splitlines()
    return Position.parse(json.loads(lines[2])["position"])
