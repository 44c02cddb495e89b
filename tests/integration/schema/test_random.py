"""Random schema changes and row changes: the capture sees exactly what the source did."""

from __future__ import annotations

import random
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.rows import dict_row

from penstock.spool import SchemaHistory
from tests.support.fix_captured import Captured, Row, capturing, change
from tests.support.fix_postgres import PostgresServer

STEPS = 60
TYPES = {"int": "7", "bigint": "70000000000", "text": "'t'", "varchar(9)": "'v'", "bool": "true"}


class Author:
    """Writes statements about one table, and records the changes that the capture must show."""

    def __init__(
        self, connection: psycopg.Connection[Row], table: str, seed: int, *, long: bool = False
    ) -> None:
        self._connection = connection
        self._random = random.Random(seed)
        self._name = self._table = table
        self._columns: dict[str, str] = {"a": "text"}
        self._key = "id"
        self._is_long = long
        self._numbers = iter(range(1, 1_000_000))
        self.expected: list[Row] = []
        self._run(f"CREATE TABLE {table} (id int PRIMARY KEY, a text)")
        self._is_full = seed % 2 == 0
        self._run(f"ALTER TABLE {table} REPLICA IDENTITY {'FULL' if self._is_full else 'DEFAULT'}")

    def write(self) -> None:
        for _ in range(STEPS):
            if self._random.random() < 0.3:
                self._transaction()
            else:
                self._step()

    def _transaction(self) -> None:
        before = (list(self.expected), dict(self._columns), self._key, self._table)
        with self._connection.transaction(force_rollback=self._random.random() < 0.3) as transaction:
            for _ in range(self._random.randint(1, 5)):
                self._part()
        if transaction.force_rollback:
            self.expected, self._columns, self._key, self._table = before

    def _part(self) -> None:
        """A step of a transaction, which may be streamed before it ends, and may be rolled back to its
        savepoint.
        """
        before = (list(self.expected), dict(self._columns), self._key, self._table)
        with self._connection.transaction(
            force_rollback=self._is_long and self._random.random() < 0.3
        ) as savepoint:
            if self._is_long:
                rows = f"SELECT {next(self._numbers)} * 1000 + i FROM generate_series(1, 400) i"
                self._expect("insert", f"INSERT INTO {self._table} ({self._key}) {rows} RETURNING *")
            self._step()
        if savepoint.force_rollback:
            self.expected, self._columns, self._key, self._table = before

    def _step(self) -> None:
        self._random.choice([self._insert, self._insert, self._update, self._delete, self._alter])()

    def _insert(self) -> None:
        values = [
            str(next(self._numbers)),
            *(self._random.choice(["NULL", TYPES[kind]]) for kind in self._columns.values()),
        ]
        names = [self._key, *self._columns]
        self._expect(
            "insert",
            f"INSERT INTO {self._table} ({', '.join(names)}) VALUES ({', '.join(values)}) RETURNING *",
        )

    def _update(self) -> None:
        if self._columns:
            name, kind = self._random.choice(list(self._columns.items()))
            self._expect(
                "update_postimage",
                f"UPDATE {self._table} SET {name} = {TYPES[kind]} WHERE {self._some()} RETURNING *",
            )

    def _delete(self) -> None:
        self._expect("delete", f"DELETE FROM {self._table} WHERE {self._some()} RETURNING *")

    def _some(self) -> str:
        return f"{self._key} % 3 = {self._random.randrange(3)}"

    def _expect(self, kind: str, statement: str) -> None:
        for row in self._run(statement).fetchall():
            shown = {
                name: value if kind != "delete" or name == self._key else None for name, value in row.items()
            }
            self.expected.append(change(kind, **shown))

    def _alter(self) -> None:
        self._random.choice(
            [
                self._add,
                self._drop,
                self._rename,
                self._retype,
                self._rename_table,
                self._rename_key,
                self._default,
            ]
        )()

    def _add(self) -> None:
        name = f"c{next(self._numbers)}" if self._random.random() < 0.5 else "again"
        if name not in self._columns and len(self._columns) < 6:
            kind = self._random.choice(list(TYPES))
            self._run(f"ALTER TABLE {self._table} ADD {name} {kind} DEFAULT {TYPES[kind]}")
            self._columns[name] = kind

    def _drop(self) -> None:
        if self._columns:
            name = self._random.choice(list(self._columns))
            self._run(f"ALTER TABLE {self._table} DROP {name}")
            del self._columns[name]

    def _rename(self) -> None:
        if self._columns:
            old, new = self._random.choice(list(self._columns)), f"r{next(self._numbers)}"
            self._run(f"ALTER TABLE {self._table} RENAME {old} TO {new}")
            self._columns = {new if name == old else name: kind for name, kind in self._columns.items()}

    def _retype(self) -> None:
        if self._columns:
            name, kind = self._random.choice(list(self._columns)), self._random.choice(["text", "varchar(9)"])
            self._run(
                f"ALTER TABLE {self._table} ALTER {name} DROP DEFAULT, "
                f"ALTER {name} TYPE {kind} USING left({name}::text, 5)"
            )
            self._columns[name] = kind

    def _rename_table(self) -> None:
        new = f"{self._name}_{next(self._numbers)}"
        self._run(f"ALTER TABLE {self._table} RENAME TO {new}")
        self._table = new

    def _rename_key(self) -> None:
        if self._is_full:
            return  # Of several names that such a key has had, the catalog tells only the last one.
        new = f"k{next(self._numbers)}"
        self._run(f"ALTER TABLE {self._table} RENAME {self._key} TO {new}")
        self._key = new

    def _default(self) -> None:
        for name, kind in self._columns.items():
            self._run(f"ALTER TABLE {self._table} ALTER {name} SET DEFAULT {TYPES[kind]}")

    def _run(self, statement: str) -> psycopg.Cursor[Row]:
        return self._connection.execute(statement.encode())


@pytest.mark.parametrize("reading", ["live", "behind"])
@pytest.mark.parametrize("seed", range(3))
def test_S06_every_change_has_the_shape_and_the_values_it_was_written_with(
    captured: Captured, seed: int, reading: str
) -> None:
    captured.start() if reading == "live" else captured.stop()
    author, oid = write(captured, f"random_{seed}_{reading}", seed)
    assert captured.rows(oid) == author.expected
    assert len(author.expected) > STEPS / 2
    assert_history(captured, oid)


@pytest.mark.versions(14, 18)
@pytest.mark.parametrize("seed", range(2))
def test_S05_alterations_in_transactions_that_are_sent_while_open_hold_for_whom_they_should(
    in_blocks: Captured, seed: int
) -> None:
    in_blocks.start()
    author, oid = write(in_blocks, f"long_{seed}", seed, long=True)
    assert in_blocks.rows(oid) == author.expected
    assert len(author.expected) > STEPS / 2
    assert_history(in_blocks, oid)


@pytest.fixture(scope="module")
def in_blocks(
    postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Captured]:
    """Its server sends a transaction in blocks as soon as it is a little long."""
    spool = tmp_path_factory.mktemp("in_blocks") / "spool"
    with capturing(
        postgres_server, spool, parameters={"options": "-c logical_decoding_work_mem=64kB"}
    ) as made:
        yield made


def write(captured: Captured, table: str, seed: int, *, long: bool = False) -> tuple[Author, int]:
    """The writer and the table."""
    with psycopg.connect(captured.database.dsn, autocommit=True, row_factory=dict_row) as connection:
        author = Author(connection, table, seed, long=long)
        oid = captured.oid(table)
        author.write()
    return author, oid


def assert_history(captured: Captured, oid: int) -> None:
    """It has every shape that the changes had, and each has the key."""
    schemas = captured.schemas(oid)
    assert [version.schema for version in SchemaHistory.load(captured.spool).versions(oid)] == schemas
    assert {len(schema.key) for schema in schemas} == {1}
