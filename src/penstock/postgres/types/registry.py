"""The registry of type readers: it maps a type's name or OID to the reader that decodes its values.

A reader has a name: the type's name for built-in and extension types, `text` for all types that stay text.
The reader of an array has the name of its element's reader with `[]`, or with the delimiter between the
brackets if that is not a comma: `int4[]`, `text[;]`. The name and the Arrow type are sufficient to decode a
column; both are stored with the column's schema. Internal types that no column can have are omitted. Types
without an entry are read as text.

The OIDs of built-in types are the same everywhere. Enums, domains, arrays of them and extension types have
different OIDs in each database, and a Relation message contains only the OID. The catalog has the definition.
A type never changes its OID, kind, base type and element type, so the current catalog is valid for past
changes too. A dropped type is identified by the name in its Type message, which the server sends before the
Relation message. Without a Type message the type is read as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import pyarrow as pa

from penstock.postgres.types.binary import BINARY_TYPES, GEOMETRY_TYPES
from penstock.postgres.types.column import DecodedColumn, TextType, TypePolicy, tolerant
from penstock.postgres.types.containers import HSTORE_TYPES, VECTOR_TYPES, list_of
from penstock.postgres.types.scalars import (
    BOOLEAN_TYPES,
    FLOAT_TYPES,
    INTEGER_TYPES,
    MONEY_TYPES,
    NUMERIC_TYPES,
    TEMPORAL_TYPES,
    TEXT_TYPES,
    check_encoding,
)
from penstock.schema import Column

BUILTIN_TYPES: Final[dict[str, tuple[int, int]]] = {
    "bool": (16, 1000),
    "bytea": (17, 1001),
    "char": (18, 1002),
    "name": (19, 1003),
    "int8": (20, 1016),
    "int2": (21, 1005),
    "int2vector": (22, 1006),
    "int4": (23, 1007),
    "regproc": (24, 1008),
    "text": (25, 1009),
    "oid": (26, 1028),
    "tid": (27, 1010),
    "xid": (28, 1011),
    "cid": (29, 1012),
    "oidvector": (30, 1013),
    "json": (114, 199),
    "xml": (142, 143),
    "point": (600, 1017),
    "lseg": (601, 1018),
    "path": (602, 1019),
    "box": (603, 1020),
    "polygon": (604, 1027),
    "line": (628, 629),
    "cidr": (650, 651),
    "float4": (700, 1021),
    "float8": (701, 1022),
    "circle": (718, 719),
    "macaddr8": (774, 775),
    "money": (790, 791),
    "macaddr": (829, 1040),
    "inet": (869, 1041),
    "aclitem": (1033, 1034),
    "bpchar": (1042, 1014),
    "varchar": (1043, 1015),
    "date": (1082, 1182),
    "time": (1083, 1183),
    "timestamp": (1114, 1115),
    "timestamptz": (1184, 1185),
    "interval": (1186, 1187),
    "timetz": (1266, 1270),
    "bit": (1560, 1561),
    "varbit": (1562, 1563),
    "numeric": (1700, 1231),
    "refcursor": (1790, 2201),
    "regprocedure": (2202, 2207),
    "regoper": (2203, 2208),
    "regoperator": (2204, 2209),
    "regclass": (2205, 2210),
    "regtype": (2206, 2211),
    "uuid": (2950, 2951),
    "txid_snapshot": (2970, 2949),
    "pg_lsn": (3220, 3221),
    "tsvector": (3614, 3643),
    "tsquery": (3615, 3645),
    "regconfig": (3734, 3735),
    "regdictionary": (3769, 3770),
    "jsonb": (3802, 3807),
    "int4range": (3904, 3905),
    "numrange": (3906, 3907),
    "tsrange": (3908, 3909),
    "tstzrange": (3910, 3911),
    "daterange": (3912, 3913),
    "int8range": (3926, 3927),
    "jsonpath": (4072, 4073),
    "regnamespace": (4089, 4090),
    "regrole": (4096, 4097),
    "regcollation": (4191, 4192),
    "int4multirange": (4451, 6150),
    "nummultirange": (4532, 6151),
    "tsmultirange": (4533, 6152),
    "tstzmultirange": (4534, 6153),
    "datemultirange": (4535, 6155),
    "int8multirange": (4536, 6157),
    "pg_snapshot": (5038, 5039),
    "xid8": (5069, 271),
}

DELIMITERS: Final[dict[str, str]] = {"box": ";"}
"""The array delimiters of types whose delimiter is not a comma."""


TEXT: Final = "text"

BUILTIN_READERS: Final[Mapping[str, TextType]] = {
    **BOOLEAN_TYPES,
    **INTEGER_TYPES,
    **FLOAT_TYPES,
    **NUMERIC_TYPES,
    **MONEY_TYPES,
    **TEXT_TYPES,
    **BINARY_TYPES,
    **TEMPORAL_TYPES,
}
EXTENSION_READERS: Final[Mapping[str, TextType]] = {**HSTORE_TYPES, **VECTOR_TYPES, **GEOMETRY_TYPES}


def array_reader(element: str, delimiter: str = ",") -> str:
    """Return the name of the reader for arrays whose elements have the reader `element`."""
    return f"{element}[{'' if delimiter == ',' else delimiter}]"


def named_reader(name: str) -> str:
    """Return the name of the reader for the type `name`."""
    return name if name in BUILTIN_READERS or name in EXTENSION_READERS else TEXT


def _by_oid() -> dict[int, str]:
    readers = {oid: named_reader(name) for name, (oid, _) in BUILTIN_TYPES.items()}
    for name, (_, array_oid) in BUILTIN_TYPES.items():
        if array_oid:
            readers[array_oid] = array_reader(named_reader(name), DELIMITERS.get(name, ","))
    return readers


_BY_OID: Final = _by_oid()


def builtin_reader(type_oid: int) -> str | None:
    """Return the reader's name for a type whose OID is the same in every database; None for all others."""
    return _BY_OID.get(type_oid)


@lru_cache(maxsize=1024)
def text_type(reader: str) -> TextType:
    """Return the decoder of the reader with this name."""
    if reader.endswith("]"):
        element, _, delimiter = reader[:-1].rpartition("[")
        found = list_of(text_type(element), delimiter or ",")
        # An extension's type is identified only by its name, and so are its arrays: a text in another format
        # is inexact.
        return replace(found, decode=tolerant(found.decode)) if element in EXTENSION_READERS else found
    return BUILTIN_READERS.get(reader) or EXTENSION_READERS.get(reader) or TEXT_TYPES[TEXT]


def decode_column(values: pa.StringArray, column: Column) -> DecodedColumn:
    """Decode a column of Postgres text. The result has the type `column.arrow_type` and is null where
    `values` is null or where the type cannot hold the value. A call accepts less than 2 GiB of text, since
    the offsets of a `StringArray` have 32 bits.
    """
    reader = column.reader or builtin_reader(column.type_oid) or TEXT
    decoded = text_type(reader).decode(values, column.arrow_type)
    if decoded.inexact is not None and decoded.inexact.true_count:
        # The texts of inexact values are kept unchanged, so their encoding must be checked here.
        check_encoding(values)
    return decoded


_CATALOG = "pg_catalog"
_MAX_DEPTH = 32
"""The maximum depth of nested types. A type that is nested deeper is read as text. Postgres has no limit:
there may be domains over arrays of domains.
"""


@dataclass(frozen=True, slots=True)
class TypeFact:
    """The immutable part of a type's catalog entry."""

    oid: int
    name: str
    kind: str
    """The kind as in pg_type.typtype: `b` base, `d` domain, `e` enum, `c` composite, `r` range, `m`
    multirange.
    """
    base_oid: int = 0
    """The base type of a domain; 0 for other types."""
    base_modifier: int = -1
    element_oid: int = 0
    """The element type of an array; 0 for other types."""
    delimiter: str = ","
    """The array delimiter."""


LoadFacts = Callable[[Sequence[int]], Iterable[TypeFact]]


class TypeResolver:
    """Resolves the type of a column to a reader and an Arrow type. There is one resolver for the catalog's
    tables, and one for each replication connection.
    """

    def __init__(
        self, policy: TypePolicy | None = None, facts: Iterable[TypeFact] = (), load: LoadFacts | None = None
    ) -> None:
        """`facts` are known types. `load` queries the catalog for other types, and for the types that they
        consist of.
        """
        self._policy = policy or TypePolicy()
        self._facts = {fact.oid: fact for fact in facts}
        self._load = load
        self._asked: set[int] = set()
        self._learned: dict[int, str] = {}

    def learn(self, oid: int, namespace: str, name: str) -> None:
        """Process a Type message. It contains the type's name or, for a domain, the name of its base type."""
        self._learned[oid] = _reader_by_name(namespace or _CATALOG, name)

    def prepare(self, oids: Iterable[int]) -> None:
        """Query the catalog for all types among `oids` that are not known yet, in one query."""
        unknown = sorted(
            {oid for oid in oids if builtin_reader(oid) is None} - self._facts.keys() - self._asked
        )
        if unknown and self._load is not None:
            self._facts.update({fact.oid: fact for fact in self._load(unknown)})
            self._asked.update(unknown)

    def column(self, name: str, type_oid: int, type_modifier: int) -> Column:
        if self._policy.is_text:
            return Column(name, pa.string(), type_oid, type_modifier, TEXT)
        self.prepare([type_oid])
        reader, modifier = self._resolve(type_oid, type_modifier)
        arrow_type = text_type(reader).arrow_type(modifier, self._policy)
        return Column(
            name,
            arrow_type,
            type_oid,
            type_modifier,
            "" if builtin_reader(type_oid) or reader == TEXT else reader,
        )

    def _resolve(self, oid: int, modifier: int, depth: int = 0) -> tuple[str, int]:
        """Return the name of the reader, and the type modifier. A domain replaces the column's modifier by
        that in its own definition.
        """
        if depth > _MAX_DEPTH:
            return TEXT, -1
        builtin = builtin_reader(oid)
        if builtin is not None:
            return builtin, modifier
        fact = self._facts.get(oid)
        if fact is None:
            return self._learned.get(oid, TEXT), -1
        if fact.kind == "d":
            return self._resolve(fact.base_oid, fact.base_modifier, depth + 1)
        if fact.element_oid:
            element, modifier = self._resolve(fact.element_oid, modifier, depth + 1)
            return array_reader(element, fact.delimiter), modifier
        if fact.kind == "b" and fact.name in EXTENSION_READERS:
            return fact.name, modifier
        return TEXT, modifier


def _reader_by_name(namespace: str, name: str) -> str:
    """Return the reader for a type of which only the name is known. The name of an array type is that of its
    element type with a leading underscore.
    """
    element = name.removeprefix("_")
    if namespace == _CATALOG:
        known = name if name in BUILTIN_TYPES else element if element in BUILTIN_TYPES else None
    else:
        known = name if name in EXTENSION_READERS else element if element in EXTENSION_READERS else None
    if known is None:
        return TEXT
    return (
        named_reader(known)
        if known == name
        else array_reader(named_reader(known), DELIMITERS.get(known, ","))
    )
