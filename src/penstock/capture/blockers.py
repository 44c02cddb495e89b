"""Why a table's changes would not arrive, or not whole: each reason as a `Blocker`, with the statements that mend it.

Pure: from what was observed at the source to a list. Three kinds, in this order: what a publication leaves out, what a relation cannot do,
what the role may not do. The last only counts when there is something to create.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from penstock.contracts.provisioning import Blocker
from penstock.errors import (
    NoTablesError,
    PrivilegeError,
    PublicationError,
    ReplicaIdentityError,
    ServerUnfitError,
    StandbyError,
    UnsupportedTableError,
)
from penstock.postgres.privileges import Role
from penstock.postgres.publication import OPERATIONS, Publication, Relation
from penstock.postgres.queries import identifier
from penstock.schema import TableName

_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence", "c": "a composite type", "i": "an index"}


def outside_kind(kind: str | None, persistence: str | None) -> str | None:
    """What a relation is, if it is something that never enters the log; None for a table that can be captured."""
    if kind not in ("r", "p"):
        return _KINDS.get(kind or "", "no table")
    return {"u": "unlogged", "t": "temporary"}.get(persistence or "")


def publication_blockers(name: str, publication: Publication | None, relations: Sequence[Relation]) -> Iterator[Blocker]:
    """What an existing publication leaves out."""
    if publication is None:
        return
    own = identifier(name)
    if publication.omitted:
        yield Blocker(
            PublicationError.code,
            f"publication {name} leaves out {' and '.join(publication.omitted)}",
            f"ALTER PUBLICATION {own} SET (publish = '{', '.join(OPERATIONS)}');",
        )
    partitioned = _names(relation for relation in relations if relation.kind == "p")
    if partitioned and not publication.via_root:
        yield Blocker(
            PublicationError.code,
            f"publication {name} sends changes of partitioned tables under the names of their partitions",
            f"ALTER PUBLICATION {own} SET (publish_via_partition_root = true);",
            partitioned,
        )
    for relation in relations:
        if relation.leaves_key_out:
            table = table_sql(relation.name)
            yield Blocker(
                PublicationError.code,
                f"publication {name} lists columns of table {relation.name}, and its key is not among them",
                f"BEGIN; ALTER PUBLICATION {own} DROP TABLE ONLY {table}; ALTER PUBLICATION {own} ADD TABLE ONLY {table}; COMMIT;",
                (relation.name,),
            )


def relation_blockers(publication: Publication | None, relations: Iterable[Relation]) -> Iterator[Blocker]:
    """What a relation cannot do, or what publishing it would break."""
    for relation in relations:
        yield from _relation_blockers(publication, relation)


def _relation_blockers(publication: Publication | None, relation: Relation) -> Iterator[Blocker]:
    name, table = relation.name, table_sql(relation.name)
    if relation.oid is None:
        yield Blocker(NoTablesError.code, f"there is no table {name} in the source", "check the name; case counts", (name,))
        return
    kind = outside_kind(relation.kind, relation.persistence)
    if kind is not None:
        remedy = f"ALTER TABLE {table} SET LOGGED;" if kind == "unlogged" else "capture the tables that its rows come from"
        yield Blocker(UnsupportedTableError.code, f"{name} is {kind}: its changes do not enter the log", remedy, (name,))
        return
    if relation.root is not None and not relation.is_published and (publication is None or publication.via_root):
        yield Blocker(
            UnsupportedTableError.code,
            f"{name} is a partition of {relation.root}, and its changes arrive under that name",
            f"ask for {relation.root} instead",
            (name,),
        )
    for partition in relation.apart:
        yield Blocker(
            UnsupportedTableError.code,
            f"partition {partition} of table {name} is unlogged or foreign: its changes do not enter the log",
            f"ALTER TABLE {partition} SET LOGGED; or, if it is foreign: ALTER TABLE {table} DETACH PARTITION {partition};",
            (name,),
        )
    if not relation.has_identity and not relation.is_published and (publication is None or publication.update or publication.delete):
        yield Blocker(
            ReplicaIdentityError.code,
            f"table {name} has neither a primary key nor another replica identity: once published, UPDATE and DELETE on it would fail",
            f"ALTER TABLE {table} ADD PRIMARY KEY (…); or else: ALTER TABLE {table} REPLICA IDENTITY FULL;",
            (name,),
        )


def role_blockers(name: str, publication: Publication | None, missing: Sequence[Relation], role: Role, statement: str) -> Iterator[Blocker]:
    """What the role may not do that the gap needs. `statement` is what closes the gap."""
    if role.is_on_standby:
        yield Blocker(StandbyError.code, "the server is a standby, on which nothing can be created", f"on the primary: {statement}")
        return
    if publication is not None and publication.all_tables:
        names = _names(missing)
        what = f"publication {name} is FOR ALL TABLES, and does not hold {', '.join(map(str, names))}"
        yield Blocker(PublicationError.code, what, "use another publication", names)
        return
    if role.is_read_only:
        yield Blocker(
            ServerUnfitError.code,
            f"transactions of role {role.name} are read-only",
            f"ALTER ROLE {role.identifier} SET default_transaction_read_only = off; or, as another role: {statement}",
        )
    if publication is None and not role.may_create:
        what = f"role {role.name} may not create publications in database {role.database}"
        yield Blocker(PrivilegeError.code, what, role.creation_grant())
    if publication is not None and not publication.is_ours:
        yield Blocker(
            PrivilegeError.code,
            f"publication {name} belongs to {publication.owner}, and only its owner may add tables to it",
            f"as {publication.owner}: {statement}",
        )
    yield from _table_rights(missing, role, statement)


def _table_rights(missing: Sequence[Relation], role: Role, statement: str) -> Iterator[Blocker]:
    for schema in sorted({relation.name.schema for relation in missing if not relation.is_reachable}):
        yield Blocker(
            PrivilegeError.code,
            f"role {role.name} may not use schema {schema}",
            f"GRANT USAGE ON SCHEMA {identifier(schema)} TO {role.identifier};",
            _names(relation for relation in missing if relation.name.schema == schema),
        )
    foreign: dict[str, list[Relation]] = defaultdict(list)
    for relation in missing:
        if not relation.is_ours and relation.owner is not None:
            foreign[relation.owner].append(relation)
    for owner, relations in foreign.items():
        names = _names(relations)
        what = f"only {owner}, who owns {', '.join(map(str, names))}, may publish {'them' if len(names) > 1 else 'it'}"
        # Not a GRANT of the owner's role: it would give away far more than is needed.
        who = f"as {owner}" if len(foreign) == 1 else "as a superuser"
        yield Blocker(PrivilegeError.code, what, f"{who}: {statement}", names)


def table_sql(table: TableName) -> str:
    return identifier(table.schema, table.name)


def _names(relations: Iterable[Relation]) -> tuple[TableName, ...]:
    return tuple(relation.name for relation in relations)
