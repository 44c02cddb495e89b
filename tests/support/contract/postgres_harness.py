"""The sink contract for Postgres tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from typing_extensions import override

from penstock.errors import (
    ConnectionLostError,
)
from penstock.postgres.connection import SourceAddress
from penstock.sinks.executors import In, Out
from penstock.sinks.postgres.sink import PostgresSink
from penstock.sinks.postgres.targets import Naming
from tests.support.contract.sink_harness import PIPELINE, SinkHarness
from tests.support.fix_postgres import Database
from tests.support.sinks.source import Row, Value
from tests.support.snapshot.local import LocalExecutors


class ForgetfulExecutors(LocalExecutors):
    """Runs the task and loses its result, or delays the task."""

    is_silent = is_late = False

    def __init__(self) -> None:
        self.kept: list[Callable[[], object]] = []

    @override
    def run(self, function: Callable[[In], Out], tasks: Sequence[In], *, light: bool = False) -> list[Out]:
        if self.is_late:
            self.kept += [partial(function, task) for task in tasks]
            return []
        done = super().run(function, tasks)
        if self.is_silent:
            raise ConnectionLostError("the answer was lost")
        return done


class PostgresHarness(SinkHarness):
    def __init__(self, root: Path, database: Database) -> None:
        self.database = database
        self.address = SourceAddress.parse(database.dsn)
        self.executors = ForgetfulExecutors()
        super().__init__(root)

    @override
    def open(self, pipeline: str = PIPELINE) -> PostgresSink:
        return PostgresSink(self.executors, self.address, pipeline, Naming(prefix="copy_"))

    @override
    def rows(self) -> list[Row]:
        if self.database.query("SELECT to_regclass('copy_public.items') IS NULL") == [(True,)]:
            return []
        found = self.database.query("SELECT id::text, note, size::text FROM copy_public.items")
        return sorted(
            (
                {name: Value(value) for name, value in zip(("id", "note", "size"), row, strict=True)}
                for row in found
            ),
            key=repr,
        )

    @override
    def put_foreign(self) -> None:
        self.database.execute("CREATE SCHEMA copy_public; CREATE TABLE copy_public.items (id int)")

    @override
    @contextmanager
    def dying(self) -> Iterator[None]:
        self.database.execute(
            """
            CREATE FUNCTION copy_public.die() RETURNS trigger LANGUAGE plpgsql AS
                'BEGIN
                    PERFORM pg_catalog.pg_terminate_backend(pg_catalog.pg_backend_pid()); RETURN NULL;
                END';
            CREATE CONSTRAINT TRIGGER die AFTER INSERT ON copy_public.items DEFERRABLE INITIALLY DEFERRED
                FOR EACH ROW EXECUTE FUNCTION copy_public.die()
            """
        )
        yield
        self.database.execute("DROP TRIGGER die ON copy_public.items; DROP FUNCTION copy_public.die()")

    @override
    @contextmanager
    def unanswered(self) -> Iterator[None]:
        self.executors.is_silent = True
        yield
        self.executors.is_silent = False
