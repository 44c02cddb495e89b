"""A pipeline that runs in a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.cli.table_commands import order
from penstock.config.model import load_config
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.pipeline import RunResult
from penstock.pipeline.table_states import TableState
from penstock.position import Position
from penstock.schema import TableName
from penstock.testing.streams import wait_for
from tests.support.fix_pipeline import Mirror

DEADLINE_SECONDS = 240.0


class Running:
    """A pipeline that runs in its own thread."""

    def __init__(self, mirror: Mirror, observer: PipelineObserver | None = None) -> None:
        self.mirror = mirror
        self.pipeline = mirror.pipeline(observer, reload=lambda: load_config(mirror.path))
        self.result: RunResult | None = None
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pipeline")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self.pipeline.run()
        except BaseException as error:  # noqa: BLE001 it is raised in the test's own thread
            self.failure = error

    def state(self, table: str) -> TableState | None:
        if self.failure is not None:
            raise self.failure
        status = self.pipeline.statuses.get(TableName.parse(table))
        return status.state if status is not None else None

    def wait_for_state(self, table: str, state: TableState | None) -> None:
        wait_for(
            lambda: self.state(table) is state,
            f"{table} to be {state}",
            lambda: self.pipeline.statuses,
            DEADLINE_SECONDS,
        )

    def wait_for_rows(self, table: str, count: int) -> None:
        def there() -> bool:
            return self.failure is not None or len(self.mirror.rows(table)) == count

        wait_for(there, f"{count} rows of {table}", lambda: self.pipeline.statuses, DEADLINE_SECONDS)
        assert self.failure is None, self.failure

    def wait_for_position(self, position: Position) -> None:
        def there() -> bool:
            return self.failure is not None or self.pipeline.position >= position

        wait_for(there, f"everything up to {position}", lambda: self.pipeline.statuses, DEADLINE_SECONDS)
        assert self.failure is None, self.failure

    def order(self, what: str, table: str) -> None:
        order(self.mirror.path, [table], what)

    def stop(self) -> None:
        self.pipeline.stop()
        self._thread.join(DEADLINE_SECONDS)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure


@contextmanager
def running(mirror: Mirror, observer: PipelineObserver | None = None) -> Iterator[Running]:
    made = Running(mirror, observer)
    try:
        yield made
    finally:
        made.stop()
