"""From a type's OID to how its values are read.

The OIDs of built-in types are the same everywhere. Those of enums, domains, arrays of them and extension types are not, and a Relation
message holds nothing but the number; what it stands for comes from the catalog (a type keeps its OID, its kind and its element for life) or
from the Type message that the server sends before such a Relation.
"""

from __future__ import annotations

from penstock.postgres.types.registry import arrow_type
from penstock.schema import Column


class TypeResolver:
    """Gives columns their types. One serves the catalog's tables, one each replication connection."""

    def learn(self, oid: int, namespace: str, name: str) -> None:
        """Take in what a Type message says: the type's name, or the name of its base type if it is a domain."""

    def column(self, name: str, type_oid: int, type_modifier: int) -> Column:
        return Column(name, arrow_type(type_oid, type_modifier), type_oid, type_modifier)
