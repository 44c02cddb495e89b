r"""Columns of text into a table: `COPY … FROM STDIN`, thousands of rows a message.

The other direction of `copying.py`, in the same format: a tab between values, a newline behind each row, `\N` for NULL, and inside a value
these are written `\t`, `\n` and `\\`. Arrow joins whole columns at once, so the bytes of the array that comes of it are the message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from penstock.postgres.connection import Connection

_BLOCK_BYTES = 4 << 20
_BLOCK_ROWS = 65_536
_SPECIAL = np.frombuffer(b"\\\t\n\r", np.uint8)
# The backslash first: it stands for itself only where it was there before.
_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_TAB, _END, _NOTHING = pa.scalar("\t", pa.large_string()), pa.scalar("\n", pa.large_string()), pa.scalar("", pa.large_string())


def load_rows(connection: Connection, table: sql.Composable, names: Sequence[str], blocks: Iterable[Sequence[pa.Array]]) -> int:
    """Copy rows into the columns `names` of a table, each block an array of text for each of them; gives the number of rows.

    Raises the driver's errors.
    """
    columns = sql.SQL(", ").join(map(sql.Identifier, names))
    rows = 0
    with connection.cursor() as cursor, cursor.copy(sql.SQL("COPY {} ({}) FROM STDIN").format(table, columns)) as copy:
        for block in blocks:
            for piece in _pieces(block):
                copy.write(copy_text(piece))
                rows += len(piece[0])
    return rows


def copy_text(columns: Sequence[pa.Array]) -> pa.Buffer:
    """Rows as COPY reads them, from at least one column of text."""
    cells = [_escaped(column) for column in columns]
    lines = pc.binary_join_element_wise(*cells, _TAB, null_handling="replace", null_replacement="\\N")
    lines = pc.binary_join_element_wise(lines, _NOTHING, _END)
    return pa.py_buffer(_octets(lines))


def _escaped(texts: pa.Array) -> pa.Array:
    # Wide offsets: a few values may come to more than a narrow array holds.
    texts = texts.cast(pa.large_string())
    if np.isin(_octets(texts), _SPECIAL).any():
        for meant, written in _ESCAPES.items():
            texts = pc.replace_substring(texts, meant, written)
    return texts


def _octets(texts: pa.Array) -> npt.NDArray[np.uint8]:
    """What the values themselves take of their buffer, which an array may share with others."""
    _, places, octets = texts.buffers()
    if octets is None or not len(texts):
        return np.empty(0, np.uint8)
    offsets = np.frombuffer(places, np.int64, count=len(texts) + 1, offset=texts.offset * 8)
    return np.frombuffer(octets, np.uint8)[offsets[0] : offsets[-1]]


def _pieces(block: Sequence[pa.Array]) -> Iterator[list[pa.Array]]:
    """A block in parts of some megabytes, or of one row, if that is larger."""
    count = len(block[0])
    size = sum(column.nbytes for column in block)
    step = max(1, min(_BLOCK_ROWS, count if size <= _BLOCK_BYTES else count * _BLOCK_BYTES // size))
    for start in range(0, count, step):
        yield [column.slice(start, step) for column in block]
