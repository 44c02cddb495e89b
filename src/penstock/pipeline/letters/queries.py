"""Spark's answers about changes that are screened, where it takes those to say which of them are refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from penstock.pipeline.letters.task import ScreeningTask, ask_screening
from penstock.sinks.executors import Executors
from penstock.spool import storage
from penstock.transforms.asking import Queries


@contextmanager
def answered(task: ScreeningTask, executors: Executors, queries: Queries | None, directory: Path) -> Iterator[ScreeningTask]:
    """The task as it can be run. What Spark answered lies in `directory` for the length of the block."""
    if all(fitted.query is None for fitted in task.fitted.values()):
        yield task
        return
    assert queries is not None, "a pipeline has somebody to ask"
    place = directory / uuid4().hex
    storage.make_directory(place)
    try:
        task = replace(task, answers=str(place))
        (asked,) = executors.run(ask_screening, [task])
        for number, fitted, path in asked:
            queries.answer(fitted, [path], str(place / str(number)))
        yield task
    finally:
        shutil.rmtree(place, ignore_errors=True)
