"""Why a table's changes would not arrive, or not whole: each reason as a `Blocker`, with the statements that mend it.

Pure: from what was observed at the source to a list. Three kinds, in this order: what a publication leaves out, what a relation cannot do,
what the role may not do. The last only counts when there is something to create.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from penstock.contracts.provisioning import Blocker, CoverageReport
from penstock.errors import (
    NoTablesError,
    PartitionIdentityError,
    PrivilegeError,
    PublicationError,
    ReplicaIdentityError,
    ServerUnfitError,
    StandbyError,
    UnsupportedTableError,
    UntrustedObjectError,
)
from penstock.postgres.ownership import Trust, remedy
from penstock.postgres.partition_identity import PartitionMismatch, describe_mismatches
from penstock.postgres.privileges import Role, Unreadable
from penstock.postgres.publication import OPERATIONS, HeapIdentity, Listing, Publication, Relation
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
        if relation.listing is not None:
            yield from _listing_blockers(name, publication, relation, relation.listing)


def ownership_blockers(publication: Publication | None, relations: Sequence[Relation], trust: Trust) -> Iterator[Blocker]:
    """A publication whose owner could leave out changes of tables that are not its own."""
    if publication is None or trust.covers_or_owns_database(publication.owner):
        return
    if all(relation.owner == publication.owner for relation in relations if relation.oid is not None):
        return  # the owner of a table may do as it likes with the rows anyway
    own = identifier(publication.name)
    yield Blocker(
        UntrustedObjectError.code,
        f"publication {publication.name} belongs to role {publication.owner}, which does not own all the tables and could leave out rows",
        f"ALTER PUBLICATION {own} OWNER TO {identifier(trust.role)}; or {remedy(publication.owner)}",
    )


def _listing_blockers(name: str, publication: Publication, relation: Relation, listing: Listing) -> Iterator[Blocker]:
    """What is wrong with a list of columns."""
    who = f"publication {name} lists columns of table {relation.name}"
    if listing.lacks_key:
        columns = f" ({', '.join(map(identifier, listing.columns))})"
        yield Blocker(
            PublicationError.code, f"{who}, and its key is not among them", _listing_sql(name, relation, listing, columns), (relation.name,)
        )
    heaps = relation.listed_full
    if heaps and (publication.update or publication.delete):
        whose = ", which" if heaps[0].name == relation.name else f", and its partition {', '.join(str(heap.name) for heap in heaps)}"
        fix = " ".join(f"ALTER TABLE {table_sql(heap.name)} REPLICA IDENTITY DEFAULT;" for heap in heaps)
        whole = _listing_sql(name, relation, listing)
        yield Blocker(
            PublicationError.code,
            f"{who}{whose} has REPLICA IDENTITY FULL: UPDATE and DELETE on it fail",
            fix if all(heap.is_immediate for heap in heaps) else f"to publish all its columns: {whole}",
            (relation.name,),
        )


def _listing_sql(name: str, relation: Relation, listing: Listing, columns: str = "") -> str:
    """Have the publication list other columns, or all of them, under the same row filter."""
    own, table = identifier(name), table_sql(relation.name)
    where = f" WHERE ({listing.row_filter})" if listing.row_filter is not None else ""
    drop, add = (f"ALTER PUBLICATION {own} {verb} TABLE ONLY {table}" for verb in ("DROP", "ADD"))
    return f"BEGIN; {drop}; {add}{columns}{where}; COMMIT;"


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
    if publication is None or publication.update or publication.delete:
        yield from _hidden_blockers(publication, relation)
        if not relation.is_published:
            yield from _identity_blockers(relation)


def _hidden_blockers(publication: Publication | None, relation: Relation) -> Iterator[Blocker]:
    """Replica identities of which a part is generated and not published: they fail also where a table is published already."""
    for heap in (heap for heap in relation.unidentified if heap.hidden):
        own = table_sql(heap.name)
        kind, fix = "virtual", f"ALTER TABLE {own} REPLICA IDENTITY USING INDEX …; with a unique index that is not deferrable;"
        if heap.hidden == "s" and publication is not None:
            kind, fix = "stored", f"ALTER PUBLICATION {identifier(publication.name)} SET (publish_generated_columns = stored);"
        elif heap.is_immediate:
            fix = f"ALTER TABLE {own} REPLICA IDENTITY DEFAULT;"
        whole = "REPLICA IDENTITY FULL and" if heap.identity == "f" else "in its replica identity"
        fails = "UPDATE and DELETE on it fail" if relation.is_published else "once published, UPDATE and DELETE on it would fail"
        what = f"table {heap.name} has {whole} a {kind} generated column, which is not published: {fails}"
        yield Blocker(ReplicaIdentityError.code, what, fix, (relation.name,))


def _identity_blockers(relation: Relation) -> Iterator[Blocker]:
    """One for each kind of fault; it names the partitions that have it."""
    faults: dict[str, list[HeapIdentity]] = defaultdict(list)
    for heap in (heap for heap in relation.unidentified if not heap.hidden):
        faults[_identity_fault(heap)].append(heap)
    for fault, heaps in faults.items():
        who = f"table {relation.name}"
        if heaps[0].name != relation.name:
            who = f"partition {', '.join(str(heap.name) for heap in heaps)} of {who}"
        fixes = " ".join(dict.fromkeys(_identity_fix(heap, relation.name) for heap in heaps))
        full = " ".join(f"ALTER TABLE {table_sql(heap.name)} REPLICA IDENTITY FULL;" for heap in heaps)
        yield Blocker(
            ReplicaIdentityError.code,
            f"{who} has {fault}: once published, UPDATE and DELETE on it would fail",
            f"{fixes} or else: {full}" if fixes else full,
            (relation.name,),
        )


def partition_blockers(mismatches: Iterable[PartitionMismatch]) -> Iterator[Blocker]:
    """One for each table: its partitions that log old keys by another replica identity than the root announces."""
    of_table: dict[TableName, list[PartitionMismatch]] = defaultdict(list)
    for mismatch in mismatches:
        of_table[mismatch.root].append(mismatch)
    for table, found in of_table.items():
        what, fix = describe_mismatches(found), " ".join(each.fix for each in found)
        yield Blocker(PartitionIdentityError.code, what, fix, (table,))


def _identity_fault(heap: HeapIdentity) -> str:
    if heap.identity == "n":
        return "REPLICA IDENTITY NOTHING"
    if heap.identity == "i":
        return "an index as replica identity that is gone or not valid"
    return (
        "a deferrable primary key, which is no replica identity"
        if heap.has_primary
        else "neither a primary key nor another replica identity"
    )


def _identity_fix(heap: HeapIdentity, table: TableName) -> str:
    """The better way than REPLICA IDENTITY FULL, which always works; empty if there is none."""
    own = table_sql(heap.name)
    if heap.is_immediate:
        return f"ALTER TABLE {own} REPLICA IDENTITY DEFAULT;"
    if heap.has_primary:
        return f"ALTER TABLE {own} REPLICA IDENTITY USING INDEX …; with another unique index, which is not deferrable;"
    return "" if heap.identity != "d" else f"ALTER TABLE {table_sql(table)} ADD PRIMARY KEY (…);"


def reading_blockers(unreadable: Sequence[Unreadable], role: Role) -> Iterator[Blocker]:
    """Why the role cannot read tables whole; a schema is named once for all of its tables."""
    yield from _schema_rights((each.table for each in unreadable if not each.has_usage), role)
    for each in unreadable:
        if each.refused_columns:
            what = f"role {role.name} may not read table {each.table} (columns {', '.join(each.refused_columns)})"
            yield Blocker(PrivilegeError.code, what, f"GRANT SELECT ON {table_sql(each.table)} TO {role.identifier};", (each.table,))
        if each.row_security:
            what = f"policies hide rows of table {each.table} from role {role.name}"
            yield Blocker(PrivilegeError.code, what, f"ALTER ROLE {role.identifier} BYPASSRLS;", (each.table,))


def _schema_rights(tables: Iterable[TableName], role: Role) -> Iterator[Blocker]:
    schemas: dict[str, list[TableName]] = defaultdict(list)
    for table in tables:
        schemas[table.schema].append(table)
    for schema, names in sorted(schemas.items()):
        grant = f"GRANT USAGE ON SCHEMA {identifier(schema)} TO {role.identifier};"
        yield Blocker(PrivilegeError.code, f"role {role.name} may not use schema {schema}", grant, tuple(names))


def role_blockers(
    name: str, publication: Publication | None, missing: Sequence[Relation], role: Role, *, statement: str, publisher: str | None
) -> Iterator[Blocker]:
    """What the role may not do that the gap needs. `statement` closes the gap, and `publisher` may run it; None: a superuser."""
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
    yield from _schema_rights((relation.name for relation in missing if not relation.is_reachable), role)
    yield from _ownership(name, publication, missing, f"{f'as {publisher}' if publisher else 'as a superuser'}: {statement}")


def _ownership(name: str, publication: Publication | None, missing: Sequence[Relation], remedy: str) -> Iterator[Blocker]:
    """One reason, since one statement mends it. Not a GRANT of an owner's role: it would give away far more than is needed."""
    foreign: dict[str, list[TableName]] = defaultdict(list)
    for relation in missing:
        if not relation.is_ours and relation.owner is not None:
            foreign[relation.owner].append(relation.name)
    reasons = [
        f"only {owner}, who owns {', '.join(map(str, names))}, may publish {'them' if len(names) > 1 else 'it'}"
        for owner, names in foreign.items()
    ]
    tables = tuple(sorted(table for names in foreign.values() for table in names))
    if publication is not None and not publication.is_ours:
        reasons.insert(0, f"publication {name} belongs to {publication.owner}, and only its owner may add tables to it")
        tables = ()
    if reasons:
        yield Blocker(PrivilegeError.code, "; ".join(reasons), remedy, tables)


def gap_text(report: CoverageReport) -> str:
    """What is to be run, and behind it what is in the way, as comments: so that the whole can be pasted."""
    statements = " ".join(report.remediation)
    reasons = [_reason(blocker, statements) for blocker in report.blockers]
    if not statements:
        return f"in the way: {'; '.join(reasons)}"
    return "\n".join([f"run: {statements}", *(f"-- in the way: {reason}" for reason in reasons)])


def _reason(blocker: Blocker, statements: str) -> str:
    remedy = blocker.remedy.replace(statements, "run that") if statements else blocker.remedy
    return " ".join(f"{blocker.what} ({remedy})".split())


def table_sql(table: TableName) -> str:
    return identifier(table.schema, table.name)


def _names(relations: Iterable[Relation]) -> tuple[TableName, ...]:
    return tuple(relation.name for relation in relations)
