"""Errors of the source server: their messages contain no row values."""

from __future__ import annotations

import logging
import traceback

import pytest

from penstock.errors import PenstockError
from penstock.postgres.connection import SourceAddress, connect
from tests.support.fix_postgres import Database

TELL = """
CREATE TABLE t (id int PRIMARY KEY CHECK (id > 0), note text UNIQUE); INSERT INTO t VALUES (1, 'hunter2'),
  (2, 'hunter3');
CREATE FUNCTION tell(t, state text) RETURNS int LANGUAGE plpgsql AS
    $$BEGIN RAISE EXCEPTION 'no: %', $1.note USING ERRCODE = state, DETAIL = $1.note, HINT = $1.note; END$$
"""
STATEMENTS = [
    "SELECT note::int FROM public.t",
    "SELECT to_date(note, 'YYYY-MM-DD') FROM public.t",
    "INSERT INTO public.t SELECT 3, note FROM public.t",
    "UPDATE public.t SET id = -id",
    "SELECT public.tell(t, 'P0001') FROM public.t",
    "SELECT public.tell(t, '42501') FROM public.t",
    "SELECT public.tell(t, '40001') FROM public.t",
    "SELECT public.tell(t, 'XX000') FROM public.t",
    "DO $$BEGIN PERFORM note::int FROM public.t; END$$",
    "SELECT pg_catalog.jsonb_object_field('[]'::jsonb, note)::text::int, note::inet FROM public.t",
]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_server_errors_about_row_values_are_not_repeated(
    database: Database, caplog: pytest.LogCaptureFixture, statement: str
) -> None:
    database.execute(TELL)
    with pytest.raises(PenstockError) as caught, connect(SourceAddress.parse(database.dsn)) as connection:
        connection.execute(statement)
    logging.getLogger("penstock").error("failed", exc_info=caught.value)
    shown = [str(caught.value), caplog.text, "".join(traceback.format_exception(caught.value))]
    assert not [text for text in shown if "hunt" in text]
    assert "SQLSTATE" in shown[0] or "PEN-11" in shown[0]


def test_server_errors_about_names_are_repeated(database: Database) -> None:
    with (
        pytest.raises(PenstockError, match=r'relation "public\.nowhere" does not exist'),
        connect(SourceAddress.parse(database.dsn)) as connection,
    ):
        connection.execute("SELECT 1 FROM public.nowhere")
