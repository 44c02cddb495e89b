"""`COPY … TO STDOUT` and `COPY … FROM STDIN` with columns of text, thousands of rows at a time.

COPY prints every value with its type's output function, as the stream does; a cast to text would not, and
costs the server more. Each row arrives as one message. The messages are concatenated in C, and Arrow's CSV
reader splits a block of them into columns: in COPY's text format, tabs and newlines are always separators,
since inside a value they are written as `\\t` and `\\n`. Memory holds one block of some megabytes, or one row
if that is larger.

The other direction uses the same format: a tab between values, a newline after each row, `\\N` for NULL, and
escapes `\\t`, `\\n` and `\\\\` inside values. Arrow joins whole columns at once, and the bytes of the
resulting array are the message.
"""

from __future__ import annotations

import io
import select
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, takewhile
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from psycopg.pq import ExecStatus
from pyarrow import csv

from penstock.errors import ProtocolError
from penstock.postgres.connection import Connection

_BLOCK_BYTES = 4 << 20
"""The size of a block. Larger blocks do not fit into the processor's caches; smaller ones cost more per row.
"""

_WAIT_MILLISECONDS = 1000
_END = (-1, b"")
_MARK = b"\xef\xbb\xbf"
"""Arrow skips these bytes at the beginning of a file as a byte order mark."""

_BACKSLASH = ord("\\")
_PAIR, _PAIR_PLACEHOLDER = "\\\\", "\0"  # texts in Postgres contain no zero byte
_ESCAPES = {r"\b": "\b", r"\f": "\f", r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\v": "\v"}


def read_texts(connection: Connection, statement: str, columns: int) -> Generator[list[pa.StringArray]]:
    """Run a SELECT with this number of columns; yields each block of rows as one array per column. NULL
    becomes null. Until all rows are read, the connection cannot be used for anything else; if the caller
    stops earlier, it must close the connection. Raises the driver's errors.
    """
    pgconn = connection.pgconn
    result = pgconn.exec_(sql.SQL("COPY ({}) TO STDOUT").format(sql.SQL(statement)).as_string().encode())
    if result.status != ExecStatus.COPY_OUT:
        raise psycopg.errors.error_from_result(result)
    block, size = io.BytesIO(), 0
    for written in map(block.write, _messages(connection)):
        size += written
        if size >= _BLOCK_BYTES:
            yield _split(block.getbuffer()[:size], columns)
            block.seek(0)
            if size > 2 * _BLOCK_BYTES:
                block.truncate()
            size = 0
    if size:
        yield _split(block.getbuffer()[:size], columns)
    _check_end(connection)


def _messages(connection: Connection) -> Iterator[memoryview]:
    """Yield one message per row. The loop over them runs in C, since there may be a million of them per
    second.
    """
    return chain.from_iterable(_arrivals(connection))


def _arrivals(connection: Connection) -> Iterator[Iterator[memoryview]]:
    """Yield the messages that have been received, each time that some have arrived. psycopg's own wait is not
    used, since it would block all other threads.
    """
    pgconn = connection.pgconn
    readable = select.poll()
    readable.register(pgconn.socket, select.POLLIN)
    found = iter(partial(pgconn.get_copy_data, 1), _END)
    for size, first in found:
        if size:
            yield chain((first,), map(itemgetter(1), takewhile(itemgetter(0), found)))
        else:
            readable.poll(_WAIT_MILLISECONDS)
            pgconn.consume_input()


def _check_end(connection: Connection) -> None:
    """Raise the error with which the server ended the COPY early."""
    while (result := connection.pgconn.get_result()) is not None:
        if result.status != ExecStatus.COMMAND_OK:
            raise psycopg.errors.error_from_result(result)


def _split(block: memoryview, columns: int) -> list[pa.StringArray]:
    if not columns:
        return []
    source = pa.py_buffer(_MARK + bytes(block) if block[: len(_MARK)] == _MARK else block)
    read, parse, convert = _options(columns)
    read.block_size = source.size + 1
    try:
        table = csv.read_csv(
            pa.BufferReader(source), read_options=read, parse_options=parse, convert_options=convert
        )
    except pa.ArrowInvalid:
        # Arrow's message contains the row, so it must not be chained.
        raise ProtocolError(f"COPY returned rows that do not have {columns} columns") from None
    return [_unescape(column.chunk(0)) for column in table.columns]


@lru_cache(maxsize=64)
def _options(columns: int) -> tuple[csv.ReadOptions, csv.ParseOptions, csv.ConvertOptions]:
    names = [str(at) for at in range(columns)]
    return (
        csv.ReadOptions(use_threads=False, column_names=names),
        csv.ParseOptions(
            delimiter="\t", quote_char=False, double_quote=False, escape_char=False, ignore_empty_lines=False
        ),
        # The decoder checks UTF-8, since it knows the column for its error.
        csv.ConvertOptions(
            check_utf8=False,
            column_types=dict.fromkeys(names, pa.string()),
            null_values=[r"\N"],
            strings_can_be_null=True,
        ),
    )


def _unescape(texts: pa.StringArray) -> pa.StringArray:
    if not _has_backslash(texts):
        return texts
    # Replace pairs of backslashes first, since a run of backslashes is decoded from its beginning.
    texts = pc.replace_substring(texts, _PAIR, _PAIR_PLACEHOLDER)
    if _has_backslash(texts):
        for written, meant in _ESCAPES.items():
            texts = pc.replace_substring(texts, written, meant)
    return pc.replace_substring(texts, _PAIR_PLACEHOLDER, "\\")


def _has_backslash(texts: pa.StringArray) -> bool:
    octets = texts.buffers()[2]
    return octets is not None and bool((np.frombuffer(octets, np.uint8) == _BACKSLASH).any())


_BLOCK_ROWS = 65_536
_SPECIAL = np.frombuffer(b"\\\t\n\r", np.uint8)
# The backslash is escaped first, so that the backslashes of other escapes are not escaped again.
_LOADING_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_TAB, _LOADING_END, _NOTHING = (
    pa.scalar("\t", pa.large_string()),
    pa.scalar("\n", pa.large_string()),
    pa.scalar("", pa.large_string()),
)


def load_rows(
    connection: Connection, table: sql.Composable, names: Sequence[str], blocks: Iterable[Sequence[pa.Array]]
) -> int:
    """Copy rows into the columns `names` of a table; returns the number of rows. Each block has one text
    array per column. Raises the driver's errors.
    """
    columns = sql.SQL(", ").join(map(sql.Identifier, names))
    rows = 0
    with (
        connection.cursor() as cursor,
        cursor.copy(sql.SQL("COPY {} ({}) FROM STDIN").format(table, columns)) as copy,
    ):
        for block in blocks:
            for piece in _pieces(block):
                copy.write(copy_text(piece))
                rows += len(piece[0])
    return rows


def copy_text(columns: Sequence[pa.Array]) -> pa.Buffer:
    """Return the rows in COPY's text format. `columns` has at least one text column."""
    cells = [_escaped(column) for column in columns]
    lines = pc.binary_join_element_wise(*cells, _TAB, null_handling="replace", null_replacement="\\N")
    lines = pc.binary_join_element_wise(lines, _NOTHING, _LOADING_END)
    return pa.py_buffer(_octets(lines))


def _escaped(texts: pa.Array) -> pa.Array:
    # 64-bit offsets are needed, since a few values together may exceed 2 GiB.
    texts = texts.cast(pa.large_string())
    if np.isin(_octets(texts), _SPECIAL).any():
        for meant, written in _LOADING_ESCAPES.items():
            texts = pc.replace_substring(texts, meant, written)
    return texts


def _octets(texts: pa.Array) -> npt.NDArray[np.uint8]:
    """Return the part of the buffer that contains the values; an array may share its buffer with others."""
    _, places, octets = texts.buffers()
    if octets is None or not len(texts):
        return np.empty(0, np.uint8)
    offsets = np.frombuffer(places, np.int64, count=len(texts) + 1, offset=texts.offset * 8)
    return np.frombuffer(octets, np.uint8)[offsets[0] : offsets[-1]]


def _pieces(block: Sequence[pa.Array]) -> Iterator[list[pa.Array]]:
    """Split a block into parts of some megabytes, or of one row if that is larger."""
    count = len(block[0])
    size = sum(column.nbytes for column in block)
    step = max(1, min(_BLOCK_ROWS, count if size <= _BLOCK_BYTES else count * _BLOCK_BYTES // size))
    for start in range(0, count, step):
        yield [column.slice(start, step) for column in block]
