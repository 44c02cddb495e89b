"""Texts of every kind for the readers of every type: valid, damaged and foreign.

A reader returns a column of its type, with null for a text that the type cannot hold or refuses. The result
for one text does not depend on the other texts. So each column is read as a whole, and each of its texts
alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.change import REPLACED
from penstock.postgres.types.column import TypePolicy
from penstock.postgres.types.registry import BUILTIN_READERS, EXTENSION_READERS, array_reader, text_type
from penstock.postgres.types.rows import decode_rows
from penstock.schema import Column, TableName, TableSchema
from tests.fuzz.judge import Finding

_ELEMENTS = (*BUILTIN_READERS, *EXTENSION_READERS)
READERS = (*_ELEMENTS, *map(array_reader, _ELEMENTS), array_reader("text", ";"))
_MODIFIERS = (
    -1,
    -1,
    4,
    (12 << 16 | 2) + 4,
    (38 << 16 | 38) + 4,
    (5 << 16 | 0x7FE) + 4,
    (1000 << 16 | 3) + 4,
    (3 << 16 | 10) + 4,
    2**31 - 1,
)

_NUMBERS = (
    b"0",
    b"-1",
    b"12.50",
    b"NaN",
    b"-Infinity",
    b"1e+300",
    b"9223372036854775808",
    b"0.0000000000000000001",
    b"9" * 45,
    b"+7",
    b" 7",
    b"0x1F",
)
_MOMENTS = (
    b"2024-02-29",
    b"infinity",
    b"0044-03-15 BC",
    b"2024-02-29 23:59:59.123456",
    b"294276-12-31 23:59:59.999999+00",
    b"0001-01-01 00:00:00+00",
)
_TEXTS = (
    b"",
    b"t",
    b"f",
    b"true",
    b"a b",
    "é漢🙂".encode(),
    b"\xff\xfe",
    b"\xc3",
    b"null",
    b"NULL",
    b'{"a": [1, null]}',
    b"\\x",
    b"\\xdeadbeef",
    b"\\",
)
_LISTS = (
    b"{}",
    b"{1,2,NULL}",
    b'{"a b",c}',
    b'{"NULL","\\"\\\\"}',
    b"{{1,2},{3,4}}",
    b"[0:1]={1,2}",
    b"{t,f}",
    b"{2024-02-29}",
    b"{a;b}",
    b'{"{"}',
)
_OTHERS = (
    *(
        b'"a"=>"1", "b"=>NULL',
        b'"a"=>"\\"=>"',
        b"[1,2.5]",
        b"[]",
        b"{1:0.5,3:2}/5",
        b"{}/3",
        b"$1,234.50",
        b"-$0.01",
    ),
    *(
        b"0101000000000000000000F03F0000000000000040",
        b"0101000020E6100000000000000000F03F0000000000000040",
        b"00200000010000",
        b"01010000",
    ),
)
_POOL = (*_NUMBERS, *_MOMENTS, *_TEXTS, *_LISTS, *_OTHERS)
_MARKS = b'{}[]"\\,;:=>$-+.0129eEnNtf \x00\x7f\x80\xc3\xff'


@dataclass(frozen=True)
class ValueCase:
    reader: str
    modifier: int
    texts: tuple[bytes | None, ...]


class ValueLot:
    def __init__(self, number: int) -> None:
        self._number = number

    def case(self, index: int) -> ValueCase:
        random = Random(self._number << 32 | index)
        texts = tuple(_text(random) for _ in range(random.choice([1, 2, 2, 3, 5])))
        return ValueCase(READERS[index % len(READERS)], random.choice(_MODIFIERS), texts)


def _text(random: Random) -> bytes | None:
    chance = random.random()
    if chance < 0.05:
        return None
    if chance < 0.1:
        return random.randbytes(int(random.random() * 12))
    text = random.choice(_POOL)
    if chance < 0.2:
        return b"{" + b",".join(random.choice(_POOL) for _ in range(int(random.random() * 4))) + b"}"
    for _ in range(random.choice([0, 1, 1, 2, 4])):
        at = int(random.random() * (len(text) + 1))
        mark = _MARKS[(place := int(random.random() * len(_MARKS))) : place + 1]
        text = random.choice(
            [
                text[:at] + mark + text[at:],
                text[:at] + mark + text[at + 1 :],
                text[:at] + text[at + 1 :],
                text + text[at:],
            ]
        )
    return text


def judge_values(case: ValueCase) -> bool:
    """Whether every text was read; False if some were refused. Raises `Finding`."""
    whole = _read(case, case.texts)
    if [row for text in case.texts for row in _read(case, (text,))] != whole:
        raise Finding(f"{case.reader}: read texts in another way than each alone")
    return not any(shown is not None and REPLACED in shown for _, shown in whole)


def _read(case: ValueCase, texts: tuple[bytes | None, ...]) -> list[tuple[str, str | None]]:
    """The values, and their texts in `_exact`."""
    try:
        column = Column(
            "c",
            text_type(case.reader).arrow_type(case.modifier, TypePolicy.DEFAULT),
            0,
            case.modifier,
            case.reader,
        )
        decoded = decode_rows([_array(texts)], TableSchema(1, TableName("s", "t"), (column,), ()))
    except Exception as error:
        raise Finding(f"{case.reader}: raised {type(error).__name__}") from error
    (values,) = decoded.columns
    if values.type != column.arrow_type or len(values) != len(texts):
        raise Finding(f"{case.reader}: gave a column of another type or length")
    try:
        values.validate(full=True)
        decoded.exact.validate(full=True)
    except pa.ArrowInvalid as error:
        raise Finding(f"{case.reader}: gave a column that is not valid") from error
    exact = [None if row is None else dict(row)["c"] for row in decoded.exact.to_pylist()]
    _check(case, texts, values.is_null().to_pylist(), exact)
    return list(zip(map(str, _plain(values)), exact, strict=True))


def _check(
    case: ValueCase, texts: tuple[bytes | None, ...], nulls: list[bool], exact: list[str | None]
) -> None:
    """A value is null in the column and in `_exact`, or is in one of them; and `_exact` holds the exact
    input.
    """
    for text, is_null, shown in zip(texts, nulls, exact, strict=True):
        if text is None:
            if not is_null or shown is not None:
                raise Finding(f"{case.reader}: made something of nothing")
        elif is_null != (shown is not None):
            raise Finding(f"{case.reader}: lost a value, or has it twice")
        elif shown is not None and shown.removeprefix(REPLACED) != text.decode(errors="replace").removeprefix(
            REPLACED
        ):
            raise Finding(f"{case.reader}: gave another text as the exact one")


def _array(texts: tuple[bytes | None, ...]) -> pa.StringArray:
    """As the decoder lays them over its buffer, with any bytes; between others, as in the middle of a
    column.
    """
    sizes = np.array([0 if text is None else len(text) for text in (b"before", *texts, b"after")])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    present = np.packbits([True, *(text is not None for text in texts), True], bitorder="little")
    data = b"before" + b"".join(text or b"" for text in texts) + b"after"
    return pa.StringArray.from_buffers(
        len(texts) + 2, pa.py_buffer(offsets), pa.py_buffer(data), pa.py_buffer(present)
    )[1:-1]


def _plain(values: pa.Array) -> list[Any]:
    """Comparable as text, down to NaN and the sign of zero, and also where Python has no such date."""
    kind = values.type
    if pa.types.is_temporal(kind):
        return list(values.cast(pa.int32() if pa.types.is_date32(kind) else pa.int64()).to_pylist())
    if pa.types.is_list(kind):
        inner = _plain(values.flatten())
        sizes = [0 if size is None else size for size in values.value_lengths().to_pylist()]
        ends = np.cumsum(sizes).tolist()
        return [
            None if null else inner[end - size : end]
            for null, size, end in zip(values.is_null().to_pylist(), sizes, ends, strict=True)
        ]
    if pa.types.is_floating(kind):
        return [None if value is None else struct.pack("!d", value) for value in values.to_pylist()]
    return list(values.to_pylist())
