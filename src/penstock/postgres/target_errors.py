"""Errors of a target's server as ours. No message holds what stood in a row.

The server's own words are quoted only where they can be about nothing but names and settings (`connection.server_words`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from penstock.errors import PenstockError, PrivilegeError, SinkError, SinkRefusedError, SourceError, ValuesRefusedError
from penstock.postgres.connection import classify, is_about_names, server_words

_PASSING = frozenset({"25", "40"})  # a transaction that was ended, or that met another one
OF_VALUES = frozenset({"22", "23"})

# What depends on a table or a column is told in the detail.
_WITH_DETAIL = frozenset({"2BP01", "0A000"})


@contextmanager
def target_errors(doing: str) -> Iterator[None]:
    """Turn the driver's errors into ours."""
    try:
        yield
    except psycopg.Error as error:
        raise _translated(error, doing) from None


def _translated(error: psycopg.Error, doing: str) -> PenstockError:
    state = error.sqlstate or ""
    if state[:2] in _PASSING or state == "55P03":
        return SinkError(f"{doing}: {type(error).__name__} (SQLSTATE {state})")
    if state[:2] in OF_VALUES:
        column = f", column {error.diag.column_name!r}" if error.diag.column_name else ""
        hint = "see the server's log for the row, mend the target's table or the source's value, and copy the table anew"
        return ValuesRefusedError(f"{doing}: {type(error).__name__} (SQLSTATE {state}{column})", hint=hint)
    words = _words(error, state)
    if state == "42501":
        hint = "grant that to the role in sink.postgres.dsn; what it is to alter or to drop must belong to it"
        return PrivilegeError(f"{doing}: {words}", hint=hint)
    found = classify(state, words, doing)
    return SinkRefusedError(f"{doing}: {words} (SQLSTATE {state})", hint=_hint(error, state)) if isinstance(found, SourceError) else found


def _words(error: psycopg.Error, state: str) -> str:
    said = server_words(error)
    detail = error.diag.message_detail if state in _WITH_DETAIL and is_about_names(error) else None
    return said if detail is None else f"{said}: {'; '.join(detail.splitlines())}"


def _hint(error: psycopg.Error, state: str) -> str:
    if not is_about_names(error):
        return "see the server's log: something in the target, a trigger of its table perhaps, refused the rows"
    if state in _WITH_DETAIL:
        return "drop what the message names, restart the pipeline, and make it anew once the table has followed"
    return error.diag.message_hint or "mend what the message names, and restart the pipeline"
