"""The reference of types, from the readers themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.postgres.types.builtin import BUILTIN_TYPES
from penstock.postgres.types.column import TextType
from penstock.postgres.types.policy import TypePolicy
from penstock.postgres.types.registry import EXTENSION_READERS, TEXT, named_reader, text_type
from penstock.postgres.types.text import FORMS
from penstock.sinks.names import sql_type

_INTRO = """\
# Types

<!-- Generated from src/penstock/postgres/types by `make docs`. -->

A value is the same whether a snapshot or the stream brought it: both hand the text that Postgres writes to one decoder, under pinned
settings (UTC, ISO dates and intervals, hex bytea, UTF-8, `lc_monetary = C`). The server's own settings do not matter.

What the typed column cannot hold is null there, and its exact text stands in the map column `_exact` of the same row, under the column's
name. Nothing is rounded or clamped. With `types: {on_unrepresentable: error}` such a value stops its table instead, with `PEN-1411`;
a `WalCapture` stream, which carries all tables, it stops at its transaction, after every one before it.
"""

_OTHERS = """\
## Types of your own

| Postgres | Arrow | Spark | goes to `_exact` |
|---|---|---|---|
| enum | `string` | `string` | |
| domain | that of its base type, with the domain's own modifier | as its base type | as its base type |
| array of any type | `list` of the element's type | `array` of the element's type | more than one dimension, a lower bound other than 1, \
an element that would go there |
| composite, row of a table | `string`, `(1,"a b",)` | `string` | |
| range, multirange | `string` | `string` | |
| any other type | `string` | `string` | |

## What to know

- **numeric** with at most 38 digits is that decimal. A negative scale, or one above the precision (Postgres 15 and later), gets the
  smallest decimal that holds it: `numeric(5,-2)` is `decimal(7,0)`, `numeric(3,5)` is `decimal(5,5)`. Others are what `types.numeric` says:
  `decimal(38,18)` by default, any other `decimal(p,s)`, or `string`, which holds everything.
- **Arrays.** Postgres lets every value of an array column have its own number of dimensions and bounds; a typed column has one type, and a
  stream cannot look at all rows before it chooses one. So a list is what arrays nearly always are, and the others keep their text.
- **Dates and timestamps** are in the proleptic Gregorian calendar, in Postgres, Arrow and Spark alike; nothing is shifted before 1582.
- **time and timetz** are text: `24:00:00` and offsets have no equal in Spark, and Delta has no type for times of day.
- **money** is read with two digits after the point. Where the `lc_monetary` of those who write it has another number of them (yen: none),
  scale it yourself.
- **Shapes** of PostGIS are WKB beside their SRID (0: none). Z and M are the flags of EWKB, as PostGIS writes them.
- **Sparse vectors** count their indices from 1, as pgvector does.
- **Types of extensions** are known by name, in any schema, and a type of that name may be somebody else's: hence the last column.
- **Keys.** A key may be of any type but hstore, since Spark cannot compare maps. Where a key is beyond its type, `_exact` tells rows apart.
- **Generated columns** are left out of snapshots as they are of the stream. From Postgres 18 on, stored ones are in both if the publication
  has `publish_generated_columns = stored`; virtual ones never.
- **Encodings.** Postgres converts every encoding to UTF-8 but SQL_ASCII, which has no meaning. A text there that is not UTF-8 stops its
  table, with `PEN-1412`; the others go on. A table with such a name, or such a name of a column or partition, is refused with `PEN-1404`.
- **regclass, regtype and the like** are the names that the server gives them at that moment.
"""


def types_page() -> str:
    """Every Postgres type, what becomes of it, and what it cannot hold."""
    lines = [_INTRO, "## Built-in types", "", *_rows(_builtin()), "", "## Types of extensions", "", *_rows(_extensions()), "", _OTHERS]
    return "\n".join(lines)


def _rows(described: Iterable[tuple[str, str]]) -> list[str]:
    """A table of names and what they become; names that become the same share a row."""
    names: dict[str, list[str]] = {}
    for name, becomes in described:
        names.setdefault(becomes, []).append(name)
    rows = [f"| {', '.join(each)} | {becomes} |" for becomes, each in sorted(names.items(), key=lambda entry: len(entry[1]))]
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
