"""Reference page of the type mapping, generated from the decoders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.postgres.types.column import TextType, TypePolicy
from penstock.postgres.types.registry import BUILTIN_TYPES, EXTENSION_READERS, TEXT, named_reader, text_type
from penstock.postgres.types.scalars import FORMS
from penstock.sinks.dataframes import sql_type

_INTRO = """\
# Types

<!-- Generated from src/penstock/postgres/types by `make docs`. -->

Snapshot and stream produce the same values: one decoder reads the text form of Postgres, with fixed session settings (UTC, ISO dates and
intervals, hex bytea, UTF-8, `lc_monetary = C`). The settings of the server have no effect.

A value that the typed column cannot hold is NULL there. Its exact text is in the map column `_exact` of the same row, under the name of the
column. Nothing is rounded or clamped. With `types: {on_unrepresentable: error}` the row is rejected instead (`PEN-1411`): its table fails,
or the row becomes a dead letter. A `WalCapture` stream, which has all tables, ends before the transaction of such a value.
"""

_OTHERS = """\
## User-defined types

| Postgres | Arrow | Spark | goes to `_exact` |
|---|---|---|---|
| enum | `string` | `string` | |
| domain | as its base type, with the modifier of the domain | as its base type | as its base type |
| array of any type | `list` of the element's type | `array` of the element's type | more than one dimension, a lower bound other than 1, \
an element that goes to `_exact` |
| composite, row of a table | `string`, `(1,"a b",)` | `string` | |
| range, multirange | `string` | `string` | |
| any other type | `string` | `string` | |

## Notes

- **numeric** with at most 38 digits becomes that decimal. A negative scale, or one above the precision (Postgres 15 and later), becomes the
  smallest decimal that holds it: `numeric(5,-2)` is `decimal(7,0)`, `numeric(3,5)` is `decimal(5,5)`. All others become the type in
  `types.numeric`: `decimal(38,18)` by default, another `decimal(p,s)`, or `string`, which holds every value.
- **Arrays.** In Postgres, each value of an array column has its own number of dimensions and bounds. The typed column is a list with one
  dimension; other values go to `_exact`.
- **Dates and timestamps** use the proleptic Gregorian calendar in Postgres, Arrow and Spark. Dates before 1582 are not shifted.
- **time and timetz** are text: Spark has no equivalent for `24:00:00` and for offsets, and Delta has no time type.
- **money** is read with two decimal digits. If sessions write it with an `lc_monetary` that has another number (none for yen), scale the
  value yourself.
- **PostGIS** shapes are WKB with their SRID (0: none). Z and M use the flags of EWKB, as in PostGIS.
- **Sparse vectors** count indices from 1, as pgvector does.
- **Extension types** are recognised by name, in any schema. A different type of the same name may have another text form; such values go to
  `_exact`.
- **Keys.** A key column can have any type except hstore, because Spark cannot compare maps. A key value out of the range of its type is
  identified by its text in `_exact`.
- **Generated columns** are left out of snapshot and stream. From Postgres 18 on, both contain stored generated columns if the publication
  has `publish_generated_columns = stored`. Virtual ones are never included.
- **Encodings.** Postgres converts all encodings to UTF-8 except SQL_ASCII. A value there that is not valid UTF-8, or a value that is not
  in the text form of its type, is rejected (`PEN-1412`). A table whose name, or the name of a column or partition, is not valid UTF-8
  fails with `PEN-1404`.
- **regclass, regtype and similar types** are the names that the server returns at that time.
"""


def types_page() -> str:
    """Every Postgres type, its Arrow and Spark types, and the values that go to `_exact`."""
    lines = [
        _INTRO,
        "## Built-in types",
        "",
        *_rows(_builtin()),
        "",
        "## Types of extensions",
        "",
        *_rows(_extensions()),
        "",
        _OTHERS,
    ]
    return "\n".join(lines)


def _rows(described: Iterable[tuple[str, str]]) -> list[str]:
    """A table of type names and their mapping. Types with the same mapping share a row."""
    names: dict[str, list[str]] = {}
    for name, becomes in described:
        names.setdefault(becomes, []).append(name)
    rows = [
        f"| {', '.join(each)} | {becomes} |"
        for becomes, each in sorted(names.items(), key=lambda entry: len(entry[1]))
    ]
    return ["| Postgres | Arrow | Spark | goes to `_exact` |", "|---|---|---|---|", *rows]


def _builtin() -> Iterator[tuple[str, str]]:
    for name in BUILTIN_TYPES:
        read = text_type(named_reader(name))
        if name == "numeric":
            yield "numeric(p,s) within 38 digits", f"`decimal128(p, s)` | `decimal(p,s)` | {read.beyond}"
        yield name, _becomes(read, FORMS.get(name))


def _extensions() -> Iterator[tuple[str, str]]:
    for name, read in EXTENSION_READERS.items():
        yield name, _becomes(read, None)
    yield "citext, ltree, isn, cube, …", _becomes(text_type(TEXT), None)


def _becomes(read: TextType, form: str | None) -> str:
    arrow_type = read.arrow_type(-1, TypePolicy.DEFAULT)
    return f"`{arrow_type}`{f', {form}' if form else ''} | `{sql_type(arrow_type)}` | {read.beyond}"
