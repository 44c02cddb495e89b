"""From a type's OID to how its values are read.

The OIDs of built-in types are the same everywhere. Those of enums, domains, arrays of them and extension types are not, and a Relation
message holds nothing but the number. What it stands for comes from the catalog: a type keeps its OID, its kind, its base and its element
for life, so the catalog of now tells the truth about the past too. A type that is gone from the catalog is what the Type message calls it,
which the server sends before such a Relation; failing that, it is text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from penstock.postgres.types.builtin import BUILTIN_TYPES, DELIMITERS
from penstock.postgres.types.policy import TypePolicy
from penstock.postgres.types.registry import EXTENSION_READERS, TEXT, array_reader, builtin_reader, named_reader, text_type
from penstock.schema import Column

_CATALOG = "pg_catalog"
_MAX_DEPTH = 32
"""Domains over arrays of domains can be nested without a limit. A type that is nested deeper is read as text."""


@dataclass(frozen=True, slots=True)
class TypeFact:
    """What the catalog says about one type, as far as it cannot change."""

    oid: int
    name: str
    kind: str
    """As in pg_type.typtype: `b` base, `d` domain, `e` enum, `c` composite, `r` range, `m` multirange."""
    base_oid: int = 0
    """Of a domain."""
    base_modifier: int = -1
    element_oid: int = 0
    """Of an array."""
    delimiter: str = ","
    """Between the elements of an array."""


LoadFacts = Callable[[Sequence[int]], Iterable[TypeFact]]


class TypeResolver:
    """Gives columns their types. One serves the catalog's tables, one each replication connection."""

    def __init__(self, policy: TypePolicy | None = None, facts: Iterable[TypeFact] = (), load: LoadFacts | None = None) -> None:
        """`facts` are what is known so far; `load` asks the catalog about types that they do not cover, and those that these consist of."""
        self._policy = policy or TypePolicy()
        self._facts = {fact.oid: fact for fact in facts}
        self._load = load
        self._asked: set[int] = set()
        self._learned: dict[int, str] = {}

    def learn(self, oid: int, namespace: str, name: str) -> None:
        """Take in what a Type message says: the type's name, or the name of its base type if it is a domain."""
        self._learned[oid] = _reader_by_name(namespace or _CATALOG, name)

    def prepare(self, oids: Iterable[int]) -> None:
        """Ask about all of these at once, as far as they are unknown."""
        unknown = sorted({oid for oid in oids if builtin_reader(oid) is None} - self._facts.keys() - self._asked)
        if unknown and self._load is not None:
            self._facts.update({fact.oid: fact for fact in self._load(unknown)})
            self._asked.update(unknown)

    def column(self, name: str, type_oid: int, type_modifier: int) -> Column:
        if self._policy.is_text:
            return Column(name, pa.string(), type_oid, type_modifier, TEXT)
        self.prepare([type_oid])
        reader, modifier = self._resolve(type_oid, type_modifier)
        arrow_type = text_type(reader).arrow_type(modifier, self._policy)
        return Column(name, arrow_type, type_oid, type_modifier, "" if builtin_reader(type_oid) or reader == TEXT else reader)

    def _resolve(self, oid: int, modifier: int, depth: int = 0) -> tuple[str, int]:
        """The reader, and the modifier that holds for it: a domain brings its own."""
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
    """What can be told from a name alone. An array is called as its element, with an underscore in front."""
    element = name.removeprefix("_")
    if namespace == _CATALOG:
        known = name if name in BUILTIN_TYPES else element if element in BUILTIN_TYPES else None
    else:
        known = name if name in EXTENSION_READERS else element if element in EXTENSION_READERS else None
    if known is None:
        return TEXT
    return named_reader(known) if known == name else array_reader(named_reader(known), DELIMITERS.get(known, ","))
