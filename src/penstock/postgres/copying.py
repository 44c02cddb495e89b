r"""What a query gives, as columns of text: `COPY … TO STDOUT`, thousands of rows at a time.

COPY writes every value by its type's output function, as the stream does, whatever the type; a cast to text would not, and costs the server
more. A row comes as one message. The messages are strung together in C, with one call for each, and Arrow's CSV reader cuts a block of them
into columns: in COPY's text format a tab or a newline always separates, since inside a value they are written `\t` and `\n`.

Memory holds one block, which is some megabytes, or one row, if that is larger.
"""

from __future__ import annotations

import io
import select
from collections.abc import Generator, Iterator
from functools import lru_cache, partial
from itertools import chain, takewhile
from operator import itemgetter

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg.pq import ExecStatus
from pyarrow import csv

from penstock.errors import ProtocolError
from penstock.postgres.connection import Connection

_BLOCK_BYTES = 4 << 20
"""Larger blocks no longer fit into the processor's caches, smaller ones pay for their number."""

_WAIT_MILLISECONDS = 1000
_END = (-1, b"")
_MARK = b"\xef\xbb\xbf"
"""What Arrow passes over at the beginning of a file, taking it for a byte order mark."""

_BACKSLASH = ord("\\")
_PAIR, _STANDS_FOR_PAIR = "\\\\", "\0"  # no text in Postgres holds a zero byte
_ESCAPES = {r"\b": "\b", r"\f": "\f", r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\v": "\v"}


def read_texts(connection: Connection, statement: str, columns: int) -> Generator[list[pa.StringArray]]:
    """Run a SELECT of so many columns; each block of rows as an array for each column. NULL is null.

    The connection is of no use for anything else until the end, and must be closed if that is not reached. Raises the driver's errors.
    """
    pgconn = connection.pgconn
    result = pgconn.exec_(f"COPY ({statement}) TO STDOUT".encode())
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
    """One for each row. In a shape that needs no Python code to run for one: there may be a million of them in a second."""
    return chain.from_iterable(_arrivals(connection))


def _arrivals(connection: Connection) -> Iterator[Iterator[memoryview]]:
    """What has arrived, as often as something has. The driver would wait for more by itself, but let no other thread run meanwhile."""
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
    """The server may have given up in mid-way."""
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
        table = csv.read_csv(pa.BufferReader(source), read_options=read, parse_options=parse, convert_options=convert)
    except pa.ArrowInvalid:
        # Arrow's message holds the row, so it must not travel on.
        raise ProtocolError(f"rows that are not made of {columns} columns") from None
    return [_unescape(column.chunk(0)) for column in table.columns]


@lru_cache(maxsize=64)
def _options(columns: int) -> tuple[csv.ReadOptions, csv.ParseOptions, csv.ConvertOptions]:
    names = [str(at) for at in range(columns)]
    return (
        csv.ReadOptions(use_threads=False, column_names=names),
        csv.ParseOptions(delimiter="\t", quote_char=False, double_quote=False, escape_char=False, ignore_empty_lines=False),
        # Whether a text is UTF-8 is asked by the decoder, which knows its column.
        csv.ConvertOptions(check_utf8=False, column_types=dict.fromkeys(names, pa.string()), null_values=[r"\N"], strings_can_be_null=True),
    )


def _unescape(texts: pa.StringArray) -> pa.StringArray:
    if not _has_backslash(texts):
        return texts
    # Pairs first: in a run of backslashes it is the first two that belong together.
    texts = pc.replace_substring(texts, _PAIR, _STANDS_FOR_PAIR)
    if _has_backslash(texts):
        for written, meant in _ESCAPES.items():
            texts = pc.replace_substring(texts, written, meant)
    return pc.replace_substring(texts, _STANDS_FOR_PAIR, "\\")


def _has_backslash(texts: pa.StringArray) -> bool:
    octets = texts.buffers()[2]
    return octets is not None and bool((np.frombuffer(octets, np.uint8) == _BACKSLASH).any())
