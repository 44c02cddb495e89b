"""Query results as text, by COPY."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from penstock.errors import ProtocolError
from penstock.postgres import copy_text as copying
from penstock.postgres.copy_text import read_texts
from tests.support.fix_postgres import Database

AWKWARD = [
    "\ufeffbegins like a file", None, "", r"\N", r"\\N", "\\", "\\\\", r"\.", r"\n",
    "\n", "\\\n", "\\\\n", r"\\\t", "\t", "\r", "\r\n",
    "\b\f\v", "\x01\x7f",
    '"', '"a"', "'", ",", " ", "NULL", "null", "ünï 🚰", "\ufeff", "a\tb\nc\\d", "\\" * 7 + "n",
    "{\"a\": \"b\\n\"}", "#", "x" * 70_000,
]  # fmt: skip
ALPHABET = "\\\\\\ntrbfvN\n\t\r\b\f\v\ufeff\"',a "


def test_texts_are_unchanged_and_differ_from_null(database: Database) -> None:
    chance = random.Random(7)
    values = AWKWARD + ["".join(chance.choices(ALPHABET, k=chance.randrange(12))) for _ in range(5000)]
    assert _through_table(database, values) == [values, values[::-1]]


@pytest.mark.parametrize("block_bytes", [1, 3, 1000])
def test_blocks_may_end_after_any_row(
    database: Database, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(copying, "_BLOCK_BYTES", block_bytes)
    assert _through_table(database, AWKWARD) == [AWKWARD, AWKWARD[::-1]]


def test_other_threads_run_while_the_server_has_nothing_to_send_yet(database: Database) -> None:
    """A capture in the same process keeps answering its server."""
    turns = 0
    over = threading.Event()

    def turn() -> None:
        nonlocal turns
        while not over.wait(0.01):
            turns += 1

    with ThreadPoolExecutor(1) as pool:
        turning = pool.submit(turn)
        try:
            # A long row is sent at once; the next row arrives late.
            late = (
                "SELECT CASE g WHEN 1 THEN repeat('x', 100000) ELSE pg_sleep(1)::text END "
                "FROM generate_series(1, 2) g"
            )
            assert _read(database, late, 1) == [["x" * 100_000, ""]]
        finally:
            over.set()
        turning.result()
    assert turns > 10


def test_a_single_column_may_be_empty_or_null(database: Database) -> None:
    assert _read(database, "SELECT v FROM (VALUES ('') , (NULL), ('a')) AS t (v)", 1) == [["", None, "a"]]
    assert _read(database, "SELECT v FROM (VALUES (NULL::text), (NULL)) AS t (v)", 1) == [[None, None]]
    assert _read(database, "SELECT 'never' WHERE false", 1) == [[]]


def test_rows_that_end_in_an_error_are_not_taken_for_all_rows(database: Database) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        _read(database, "SELECT 1 / (60000 - n) FROM generate_series(1, 100000) n", 1)


def test_a_refused_statement_raises_the_error_of_the_server(database: Database) -> None:
    with pytest.raises(psycopg.errors.UndefinedTable):
        _read(database, "SELECT 1 FROM nowhere", 1)


def test_rows_of_another_width_are_not_shown(database: Database) -> None:
    with pytest.raises(ProtocolError) as caught:
        _read(database, "SELECT 'secret', 'words'", 3)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def _through_table(database: Database, values: Sequence[str | None]) -> list[list[str | None]]:
    """One column in the order of the values, one in reverse."""
    database.execute("CREATE TABLE t (n int, v text, w text)")
    with database.connect() as connection, connection.cursor() as cursor:
        rows = [(number, value, values[-1 - number]) for number, value in enumerate(values)]
        cursor.executemany("INSERT INTO t VALUES (%s, %s, %s)", rows)
        connection.commit()
    return _read(database, "SELECT v, w FROM t ORDER BY n", 2)


def _read(database: Database, statement: str, columns: int) -> list[list[str | None]]:
    found: list[list[str | None]] = [[] for _ in range(columns)]
    with psycopg.connect(database.dsn) as connection:
        for texts in read_texts(connection, statement, columns):
            for column, values in zip(found, texts, strict=True):
                values.validate(full=True)
                column.extend(values.to_pylist())
    return found
