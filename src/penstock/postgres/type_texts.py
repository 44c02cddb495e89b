"""The part of a type's definition that the text of its stored values depends on: labels of enums, attributes of composite types.

`ALTER TYPE … RENAME VALUE` and `ADD` or `DROP ATTRIBUTE` change the text of every stored value, and the log does not show it. A new label
changes no stored value. Nor does the name of an attribute, which is not part of a value's text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from penstock.postgres.connection import Connection
from penstock.postgres.queries import query

_FIRST_OWN_OID = 10_000


@dataclass(frozen=True, slots=True)
class TypeText:
    """An enum or a composite type at one moment."""

    labels: tuple[tuple[int, str], ...] = ()
    """The OID of each label, which it keeps for life, and a digest of its name; in the order of the OIDs."""
    attributes: str = ""
    """A digest of the numbers and types of the attributes."""

    def sign(self, last: int | None = None) -> str:
        """The greatest OID of a label, and a digest of the definition. With `last`, labels after this one do not count."""
        if last is None:
            last = max((oid for oid, _ in self.labels), default=0)
        held = ",".join(f"{oid}:{label}" for oid, label in self.labels if oid <= last)
        return f"{last}:{hashlib.sha256(f'{held};{self.attributes}'.encode()).hexdigest()[:16]}"

    def is_signed(self, signature: str) -> bool:
        """Whether values that were stored under this signature have the same text now."""
        return self.sign(int(signature.partition(":")[0])) == signature


def inspect_type_texts(connection: Connection, oids: Collection[int]) -> dict[int, dict[int, TypeText]]:
    """For each of the types `oids`, the enums and composite types that it is or consists of, by OID."""
    found: dict[int, dict[int, TypeText]] = {}
    wanted = [oid for oid in oids if oid >= _FIRST_OWN_OID]
    rows: list[Any] = connection.execute(query("catalog", "type_texts"), {"oids": wanted}).fetchall() if wanted else []
    for root, oid, labels, names, attributes in rows:
        found.setdefault(root, {})[oid] = TypeText(tuple(zip(labels, names, strict=True)), attributes)
    return found
