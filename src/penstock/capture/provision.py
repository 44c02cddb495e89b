"""Provision the publication and the slot, and report the reasons why changes of a table are not captured.
Each reason is a `Blocker` with the SQL statements that remove it.

Functions named `…_blockers` are pure. A report lists the blockers in this order: an untrusted owner of the
publication, omissions of the publication, relations that cannot be captured, and missing rights of the role.
Missing rights are reported only if something must be created.

`inspect_coverage` and `ensure_coverage` implement `penstock.contracts.provisioning` for Postgres. A run
starts with `ensure_capture`: it ensures the coverage, raises the blockers, and only then creates the slot.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.contracts.provisioning import Blocker, CoverageReport
from penstock.errors import (
    LockWaitError,
    NoTablesError,
    PartitionIdentityError,
    PenstockError,
    PrivilegeError,
    PublicationError,
    ReplicaIdentityError,
    ServerUnfitError,
    SourceError,
    StandbyError,
    UnsupportedTableError,
    UntrustedObjectError,
    find_error,
)
from penstock.postgres.catalog import outside_kind
from penstock.postgres.connection import Connection, SourceAddress, connect
from penstock.postgres.membership import PartitionMismatch, describe_mismatches, inspect_partition_identities
from penstock.postgres.ownership import Trust, remedy
from penstock.postgres.publication import (
    OPERATIONS,
    Addition,
    HeapIdentity,
    Listing,
    Publication,
    Relation,
    inspect_publication,
    inspect_publisher,
    inspect_relations,
)
from penstock.postgres.queries import identifier
from penstock.postgres.server import Role, Unreadable, inspect_role, log_wait
from penstock.postgres.slot import OnWait, Slot, check_server, check_slot, ensure_slot, inspect_server
from penstock.schema import TableName


def publication_blockers(
    name: str, publication: Publication | None, relations: Sequence[Relation]
) -> Iterator[Blocker]:
    """Blockers of an existing publication: operations that it omits, changes of partitions that it sends
    under the partitions' names, and column lists.
    """
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


def ownership_blockers(
    publication: Publication | None, relations: Sequence[Relation], trust: Trust
) -> Iterator[Blocker]:
    """A blocker if the publication has an untrusted owner, who could omit changes of other roles' tables."""
    if publication is None or trust.covers_or_owns_database(publication.owner):
        return
    if all(relation.owner == publication.owner for relation in relations if relation.oid is not None):
        return  # the owner of a table controls its rows anyway
    own = identifier(publication.name)
    yield Blocker(
        UntrustedObjectError.code,
        f"publication {publication.name} belongs to role {publication.owner}, which does not own all the "
        "tables and could leave out rows",
        f"ALTER PUBLICATION {own} OWNER TO {identifier(trust.role)}; or {remedy(publication.owner)}",
    )


def _listing_blockers(
    name: str, publication: Publication, relation: Relation, listing: Listing
) -> Iterator[Blocker]:
    """Blockers of a column list: it lacks a key column, or heaps of the table have REPLICA IDENTITY FULL."""
    who = f"publication {name} has a column list for table {relation.name}"
    if listing.lacks_key:
        columns = f" ({', '.join(map(identifier, listing.columns))})"
        yield Blocker(
            PublicationError.code,
            f"{who}, and the list lacks columns of the key",
            _listing_sql(name, relation, listing, columns),
            (relation.name,),
        )
    heaps = relation.listed_full
    if heaps and (publication.update or publication.delete):
        whose = (
            ", which"
            if heaps[0].name == relation.name
            else f", and its partition {', '.join(str(heap.name) for heap in heaps)}"
        )
        fix = " ".join(f"ALTER TABLE {table_sql(heap.name)} REPLICA IDENTITY DEFAULT;" for heap in heaps)
        whole = _listing_sql(name, relation, listing)
        yield Blocker(
            PublicationError.code,
            f"{who}{whose} has REPLICA IDENTITY FULL: UPDATE and DELETE on it fail",
            fix if all(heap.is_immediate for heap in heaps) else f"to publish all its columns: {whole}",
            (relation.name,),
        )


def _listing_sql(name: str, relation: Relation, listing: Listing, columns: str = "") -> str:
    """SQL that sets the column list to `columns`; if that is empty, drops the list. Keeps the row filter."""
    own, table = identifier(name), table_sql(relation.name)
    where = f" WHERE ({listing.row_filter})" if listing.row_filter is not None else ""
    drop, add = (f"ALTER PUBLICATION {own} {verb} TABLE ONLY {table}" for verb in ("DROP", "ADD"))
    return f"BEGIN; {drop}; {add}{columns}{where}; COMMIT;"


def relation_blockers(publication: Publication | None, relations: Iterable[Relation]) -> Iterator[Blocker]:
    """Blockers of each relation: it cannot be captured, or statements on it would fail once published."""
    for relation in relations:
        yield from _relation_blockers(publication, relation)


def _relation_blockers(publication: Publication | None, relation: Relation) -> Iterator[Blocker]:
    name, table = relation.name, table_sql(relation.name)
    if relation.oid is None:
        yield Blocker(
            NoTablesError.code,
            f"there is no table {name} in the source",
            "check the name, which is case-sensitive",
            (name,),
        )
        return
    kind = outside_kind(relation.kind, relation.persistence)
    if kind is not None:
        remedy = (
            f"ALTER TABLE {table} SET LOGGED;"
            if kind == "unlogged"
            else "capture the tables that its rows come from"
        )
        yield Blocker(
            UnsupportedTableError.code, f"{name} is {kind}: its changes are not in the WAL", remedy, (name,)
        )
        return
    if (
        relation.root is not None
        and not relation.is_published
        and (publication is None or publication.via_root)
    ):
        yield Blocker(
            UnsupportedTableError.code,
            f"{name} is a partition: its changes are published under the name of its root, {relation.root}",
            f"capture {relation.root} instead",
            (name,),
        )
    for partition in relation.apart:
        yield Blocker(
            UnsupportedTableError.code,
            f"partition {partition} of table {name} is unlogged or foreign: its changes are not in the WAL",
            f"ALTER TABLE {partition} SET LOGGED; "
            f"or, if it is foreign: ALTER TABLE {table} DETACH PARTITION {partition};",
            (name,),
        )
    if publication is None or publication.update or publication.delete:
        yield from _hidden_blockers(publication, relation)
        if not relation.is_published:
            yield from _identity_blockers(relation)


def _hidden_blockers(publication: Publication | None, relation: Relation) -> Iterator[Blocker]:
    """Blockers for replica identities that contain a generated column that is not published. Tables that are
    already published can have such blockers too.
    """
    for heap in (heap for heap in relation.unidentified if heap.hidden):
        own = table_sql(heap.name)
        kind, fix = (
            "virtual",
            f"ALTER TABLE {own} REPLICA IDENTITY USING INDEX …; with a unique index that is not deferrable;",
        )
        if heap.hidden == "s" and publication is not None:
            kind, fix = (
                "stored",
                f"ALTER PUBLICATION {identifier(publication.name)} SET (publish_generated_columns = stored);",
            )
        elif heap.is_immediate:
            fix = f"ALTER TABLE {own} REPLICA IDENTITY DEFAULT;"
        whole = "REPLICA IDENTITY FULL and" if heap.identity == "f" else "in its replica identity"
        fails = (
            "UPDATE and DELETE on it fail"
            if relation.is_published
            else "once published, UPDATE and DELETE on it would fail"
        )
        what = f"table {heap.name} has {whole} a {kind} generated column, which is not published: {fails}"
        yield Blocker(ReplicaIdentityError.code, what, fix, (relation.name,))


def _identity_blockers(relation: Relation) -> Iterator[Blocker]:
    """One blocker for each kind of fault in replica identities, with all partitions that have that fault."""
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
    """One blocker for each table, with the partitions whose replica identity is not that of the root."""
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
        return "a replica identity index that was dropped or is not valid"
    return (
        "a deferrable primary key, which cannot be a replica identity"
        if heap.has_primary
        else "neither a primary key nor another replica identity"
    )


def _identity_fix(heap: HeapIdentity, table: TableName) -> str:
    """A fix that is cheaper than REPLICA IDENTITY FULL, which always helps. Empty if there is none."""
    own = table_sql(heap.name)
    if heap.is_immediate:
        return f"ALTER TABLE {own} REPLICA IDENTITY DEFAULT;"
    if heap.has_primary:
        return (
            f"ALTER TABLE {own} REPLICA IDENTITY USING INDEX …; "
            "with another unique index, which is not deferrable;"
        )
    return "" if heap.identity != "d" else f"ALTER TABLE {table_sql(table)} ADD PRIMARY KEY (…);"


def reading_blockers(unreadable: Sequence[Unreadable], role: Role) -> Iterator[Blocker]:
    """Blockers for tables that the role cannot read completely. A schema that it may not use is one blocker
    for all of its tables.
    """
    yield from _schema_rights((each.table for each in unreadable if not each.has_usage), role)
    for each in unreadable:
        if each.refused_columns:
            what = (
                f"role {role.name} may not read table {each.table} (columns "
                f"{', '.join(each.refused_columns)})"
            )
            yield Blocker(
                PrivilegeError.code,
                what,
                f"GRANT SELECT ON {table_sql(each.table)} TO {role.identifier};",
                (each.table,),
            )
        if each.row_security:
            what = f"policies hide rows of table {each.table} from role {role.name}"
            yield Blocker(
                PrivilegeError.code, what, f"ALTER ROLE {role.identifier} BYPASSRLS;", (each.table,)
            )


def _schema_rights(tables: Iterable[TableName], role: Role) -> Iterator[Blocker]:
    schemas: dict[str, list[TableName]] = defaultdict(list)
    for table in tables:
        schemas[table.schema].append(table)
    for schema, names in sorted(schemas.items()):
        grant = f"GRANT USAGE ON SCHEMA {identifier(schema)} TO {role.identifier};"
        yield Blocker(
            PrivilegeError.code, f"role {role.name} may not use schema {schema}", grant, tuple(names)
        )


def role_blockers(
    name: str,
    publication: Publication | None,
    missing: Sequence[Relation],
    role: Role,
    *,
    statement: str,
    publisher: str | None,
) -> Iterator[Blocker]:
    """Blockers for the rights that the role lacks to publish the tables `missing`. `statement` is the SQL
    that publishes them, `publisher` a role that may run it; None if only a superuser may.
    """
    if role.is_on_standby:
        yield from write_blockers(role, statement)
        return
    if publication is not None and publication.all_tables:
        names = _names(missing)
        what = f"publication {name} is FOR ALL TABLES, but does not contain {', '.join(map(str, names))}"
        yield Blocker(PublicationError.code, what, "use another publication", names)
        return
    yield from write_blockers(role, statement)
    if publication is None and not role.may_create:
        what = f"role {role.name} may not create publications in database {role.database}"
        yield Blocker(PrivilegeError.code, what, role.creation_grant())
    yield from _schema_rights((relation.name for relation in missing if not relation.is_reachable), role)
    yield from _ownership(
        name, publication, missing, f"{f'as {publisher}' if publisher else 'as a superuser'}: {statement}"
    )


def _ownership(
    name: str, publication: Publication | None, missing: Sequence[Relation], remedy: str
) -> Iterator[Blocker]:
    """One blocker for all tables that the role may not publish, since one statement publishes them. The
    remedy does not grant the owner's role, which would give far more rights than needed.
    """
    foreign: dict[str, list[TableName]] = defaultdict(list)
    for relation in missing:
        if not relation.is_ours and relation.owner is not None:
            foreign[relation.owner].append(relation.name)
    reasons = [
        f"only {owner}, who owns {', '.join(map(str, names))}, may publish "
        f"{'them' if len(names) > 1 else 'it'}"
        for owner, names in foreign.items()
    ]
    tables = tuple(sorted(table for names in foreign.values() for table in names))
    if publication is not None and not publication.is_ours:
        reasons.insert(
            0, f"publication {name} belongs to {publication.owner}, and only its owner may add tables to it"
        )
        tables = ()
    if reasons:
        yield Blocker(PrivilegeError.code, "; ".join(reasons), remedy, tables)


def write_blockers(role: Role, statements: str) -> Iterator[Blocker]:
    """Blockers if nothing can be created: the server is a standby, or transactions are read-only."""
    if role.is_on_standby:
        yield Blocker(
            StandbyError.code,
            "the server is a standby, on which nothing can be created",
            f"on the primary: {statements}",
        )
    elif role.is_read_only:
        yield Blocker(
            ServerUnfitError.code,
            f"transactions of role {role.name} are read-only",
            f"ALTER ROLE {role.identifier} SET default_transaction_read_only = off; "
            f"or, as another role: {statements}",
        )


def table_sql(table: TableName) -> str:
    return identifier(table.schema, table.name)


def _names(relations: Iterable[Relation]) -> tuple[TableName, ...]:
    return tuple(relation.name for relation in relations)


_log = logging.getLogger(__name__)

_ATTEMPTS = 5


def inspect_coverage(
    address: SourceAddress,
    publication: str,
    required: Collection[TableName],
    *,
    old_rows: bool = False,
    unkeyed: Collection[TableName] = (),
) -> CoverageReport:
    """Compare `required` with the tables in the publication; changes nothing. With `old_rows`, also check
    that whole old rows are logged. `unkeyed` are tables with table mode `append`, which need no key.
    """
    with connect(address) as connection:
        return plan_coverage(connection, publication, required, old_rows=old_rows, unkeyed=unkeyed).report


def ensure_coverage(
    address: SourceAddress,
    publication: str,
    required: Collection[TableName],
    manage: bool,
    *,
    partly: bool = False,
    old_rows: bool = False,
    unkeyed: Collection[TableName] = (),
) -> CoverageReport:
    """Add the missing tables to the publication, if `manage` is set and the role has the right. If blockers
    affect some of the tables, add none, or with `partly` the others. Returns the coverage before the change.
    """
    with connect(address) as connection:
        first = plan = plan_coverage(connection, publication, required, old_rows=old_rows, unkeyed=unkeyed)
        for _ in range(_ATTEMPTS):
            if not manage or not (partly or plan.report.manageable) or plan.run(connection):
                break
            # Another session has changed the publication since it was inspected: the gap may be closed, or
            # there may be new blockers.
            plan = plan_coverage(connection, publication, required, old_rows=old_rows, unkeyed=unkeyed)
        else:
            raise LockWaitError(f"publication {publication} is being changed repeatedly by another session")
        return plan.report if plan.report.blockers else first.report


def ensure_capture(
    address: SourceAddress,
    slot: str,
    publication: str,
    tables: Collection[TableName],
    *,
    failover: bool = False,
    old_rows: bool = False,
    unkeyed: Collection[TableName] = (),
    on_wait: OnWait = log_wait,
) -> tuple[Slot, list[TableName]]:
    """Create the publication and then the slot, if they are missing; a slot must not be older than its
    publication. Returns the slot, and the tables that were not published before this call: their earlier
    changes are not in the stream. Raises if there are blockers. Creating a slot waits for open transactions;
    `on_wait` is called once a second with them.
    """
    with connect(address) as connection:
        server = inspect_server(connection)
        check_server(server)
        report = ensure_coverage(
            address, publication, tables, manage=True, old_rows=old_rows, unkeyed=unkeyed
        )
        check_coverage(report)
        found = ensure_slot(address, connection, slot, failover, on_wait)
        check_slot(found, server.database)
        return found, sorted(report.missing)


def check_coverage(report: CoverageReport) -> None:
    """Raise one error for all blockers; its class is that of the first blocker."""
    if report.blockers:
        raise blocked(report.blockers)


def blocked(blockers: Sequence[Blocker]) -> PenstockError:
    """Return one error for all blockers, of the class of the first blocker."""
    error = find_error(blockers[0].code) or SourceError
    what = "; ".join(dict.fromkeys(blocker.what for blocker in blockers))
    return error(what, hint=" ".join(dict.fromkeys(blocker.remedy for blocker in blockers)))


@dataclass(frozen=True, slots=True)
class CoveragePlan:
    """The observed coverage, and the statement that adds the missing tables without blockers (None if there
    are none).
    """

    publication: str
    report: CoverageReport
    addition: Addition | None

    def run(self, connection: Connection) -> bool:
        """Run the statement. Returns False if another session has changed the publication since it was
        inspected, as `Addition.run` does.
        """
        if self.addition is None:
            return True
        if not self.addition.run(connection):
            return False
        _log.info(
            "publication extended",
            extra={"publication": self.publication, "tables": len(self.report.addable)},
        )
        return True


def plan_coverage(
    connection: Connection,
    name: str,
    required: Collection[TableName],
    *,
    old_rows: bool = False,
    unkeyed: Collection[TableName] = (),
) -> CoveragePlan:
    """Inspect publication, relations and role. The number of queries is the same for any number of tables."""
    publication = inspect_publication(connection, name)
    relations = inspect_relations(connection, name, required)
    missing = [relation for relation in relations if not relation.is_published]
    unfit = list(relation_blockers(publication, relations))
    partitioned = [relation.name for relation in relations if relation.kind == "p"]
    unfit += partition_blockers(
        inspect_partition_identities(connection, partitioned, name, old_rows=old_rows, unkeyed=unkeyed)
    )
    # The statement leaves out tables that already have blockers, so rights on them are not checked.
    blocked_tables = {table for blocker in unfit for table in blocker.tables}
    wanting = [relation for relation in missing if relation.name not in blocked_tables]
    statement = Addition.plan(connection, name, wanting, exists=publication is not None) if wanting else None
    blockers = [
        *ownership_blockers(publication, relations, Trust.load(connection)),
        *publication_blockers(name, publication, relations),
        *unfit,
    ]
    if statement is not None:
        publisher = inspect_publisher(connection, name, wanting)
        role = inspect_role(connection)
        blockers += role_blockers(
            name, publication, wanting, role, statement=statement.text, publisher=publisher
        )
    report = CoverageReport(
        satisfied=not missing and not blockers,
        present=frozenset(relation.name for relation in relations if relation.is_published),
        missing=frozenset(relation.name for relation in missing),
        manageable=bool(missing) and not blockers,
        blockers=tuple(blockers),
        remediation=(statement.text,) if statement is not None else (),
    )
    addable = [relation for relation in wanting if relation.name in report.addable]
    addition = Addition.plan(connection, name, addable, exists=publication is not None) if addable else None
    return CoveragePlan(name, report, addition)
