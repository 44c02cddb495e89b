"""Reading rows by key under an exported snapshot."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import LockWaitError, TableRewrittenError
from penstock.postgres import snapshot_export as outline
from penstock.postgres.catalog import CatalogTable, inspect_tables
from penstock.postgres.chunks import cut_chunks, read_chunk
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.rows_by_key import KeyBatch, keys_statement, read_keys
from penstock.postgres.snapshot_export import CopyFingerprint, export_snapshot, inspect_outline
from penstock.postgres.types.column import TypePolicy
from penstock.schema import TableName
from tests.support.fix_postgres import Database
from tests.support.fix_roles import Roles
from tests.support.snapshot.tables import KEYS


def test_N03_a_key_of_any_type_finds_its_row_and_no_other(database: Database) -> None:
    database.execute(
        "CREATE TYPE mood AS ENUM ('so so', 'fine'); CREATE TYPE pair AS (a int, b text); "
        "CREATE DOMAIN code AS char(2)"
    )
    for name, (type_name, values, _) in KEYS.items():
        rows = ", ".join(f"({value}, {number})" for number, value in enumerate(values))
        database.execute(
            f'CREATE TABLE "{name}" (k {type_name} PRIMARY KEY, number int); '
            f'INSERT INTO "{name}" VALUES {rows}'
        )
    with _exported(database) as snapshot:
        for name, (_, _, asked) in KEYS.items():
            outline = _outline(database, name)
            exact = [
                text if text in ("NaN", "Infinity", "infinity") or " BC" in text else None for text in asked
            ]
            if outline.schema.columns[0].arrow_type in (pa.string(), pa.float64()):
                exact = [None] * len(asked)
            found = _read(database, snapshot, outline, [asked], [exact])
            assert sorted(row["number"] for row in found) == list(range(len(asked))), name


def test_N05_a_composite_key_finds_its_row(database: Database) -> None:
    database.execute('CREATE TABLE t ("The Key" text, k0 int, n bigint, t text, PRIMARY KEY ("The Key", k0))')
    database.execute(
        "INSERT INTO t SELECT 'k' || g % 100, g, g, 'v' || g FROM generate_series(1, 20000) g; ANALYZE t"
    )
    with _exported(database) as snapshot:
        found = _read(
            database, snapshot, _outline(database, "t"), [["k7", "k8", "k7"], ["107", "107", "99999"]]
        )
    assert [row["n"] for row in found] == [107]


def test_N03_keys_that_only_the_server_takes_for_the_same_bring_a_row_once(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (k numeric, i interval, PRIMARY KEY (k, i)); "
        "INSERT INTO t VALUES (1.00, '1 day'), (2, '1 day')"
    )
    with _exported(database) as snapshot:
        outline = _outline(database, "t", policy=TypePolicy("string"))
        asked = [["1", "1.00", "1.00", "1.0", "2.0"], ["P1D", "PT24H", "P1D", "P1D", "P1D"]]
        assert [row["k"] for row in _read(database, snapshot, outline, asked)] == ["1.00"]


def test_keys_are_found_by_their_index(database: Database) -> None:
    database.execute("CREATE TABLE t (a varchar(20), b numeric(10,2), v text, PRIMARY KEY (a, b))")
    database.execute(
        "INSERT INTO t SELECT 'k' || g, g / 100.0, 'v' FROM generate_series(1, 5000) g; ANALYZE t"
    )
    outline = _outline(database, "t")
    texts = [
        pa.array([f"k{number}" for number in range(1, 3000)]),
        pa.array([str(number / 100) for number in range(1, 3000)]),
    ]
    with database.connect() as connection:
        for setting in ("enable_seqscan", "enable_hashjoin", "enable_mergejoin"):
            connection.execute(f"SET LOCAL {setting} = off".encode())
        plan = "\n".join(
            row[0] for row in connection.execute(f"EXPLAIN {keys_statement(outline, texts)}".encode())
        )
    assert "Index Cond" in plan
    assert "t_pkey" in plan
    assert "Seq Scan" not in plan


@pytest.mark.versions(15)
@pytest.mark.parametrize(
    ("extension", "type_name", "value"),
    [
        ("citext", "citext", "'Key' || g"),
        ("ltree", "ltree", "('top.Key' || g)::ltree"),
        ("citext", "word", "'Key' || g"),
    ],
)
def test_a_key_of_an_extension_type_is_found_by_the_operator_of_its_index(
    database: Database, extension: str, type_name: str, value: str
) -> None:
    database.execute(f"CREATE EXTENSION {extension}")
    if type_name == "word":
        database.execute("CREATE DOMAIN word AS citext")
    database.execute(
        f"CREATE TABLE t (k {type_name} PRIMARY KEY, n int); "
        f"INSERT INTO t SELECT {value}, g FROM generate_series(1, 5000) g"
    )
    outline = _outline(database, "t")
    prefix = "top.Key" if type_name == "ltree" else "Key"
    asked = [f"{prefix}{number}" for number in range(1, 200)]
    with _exported(database) as snapshot:
        found = _read(database, snapshot, outline, [[*asked, asked[0].lower()]])
    assert sorted(row["n"] for row in found) == list(range(1, 200))
    with connect(SourceAddress.parse(database.dsn)) as connection:
        for setting in ("enable_seqscan", "enable_hashjoin", "enable_mergejoin"):
            connection.execute(f"SET {setting} = off".encode())
        explained = connection.execute(
            f"EXPLAIN {keys_statement(outline, [pa.array(asked)])}".encode()
        ).fetchall()
    plan = "\n".join(str(row) for row in explained)
    assert "Index Cond" in plan
    assert "Seq Scan" not in plan


@pytest.mark.versions(15)
def test_a_key_is_found_though_its_type_separates_values_of_an_array_by_another_sign(
    database: Database,
) -> None:
    """As PostGIS has it: an extension's operator class of a type whose delimiter is no comma, here that of
    `box`.
    """
    database.execute(
        """
        CREATE EXTENSION citext;
        CREATE FUNCTION box_same(box, box)
          RETURNS bool LANGUAGE sql IMMUTABLE STRICT AS 'SELECT $1::text = $2::text';
        CREATE FUNCTION box_less(box, box)
          RETURNS bool LANGUAGE sql IMMUTABLE STRICT AS 'SELECT $1::text < $2::text';
        CREATE FUNCTION box_order(box, box) RETURNS int LANGUAGE sql IMMUTABLE STRICT AS
            'SELECT CASE WHEN $1::text < $2::text THEN -1 WHEN $1::text = $2::text THEN 0 ELSE 1 END';
        CREATE OPERATOR === (leftarg = box, rightarg = box, function = box_same);
        CREATE OPERATOR <<< (leftarg = box, rightarg = box, function = box_less);
        CREATE OPERATOR CLASS box_texts DEFAULT FOR TYPE box USING btree AS
            OPERATOR 1 <<<, OPERATOR 3 ===, FUNCTION 1 box_order(box, box);
        ALTER EXTENSION citext ADD OPERATOR === (box, box);
        ALTER EXTENSION citext ADD OPERATOR CLASS box_texts USING btree;
        CREATE TABLE t (k box PRIMARY KEY, n int);
        INSERT INTO t SELECT box(point(g, g), point(0, 0)), g FROM generate_series(1, 9) g
        """
    )
    outline = _outline(database, "t")
    asked = [f"({number},{number}),(0,0)" for number in (2, 3, 99)]
    assert "OPERATOR" in keys_statement(outline, [pa.array(asked)])
    with _exported(database) as snapshot:
        assert sorted(row["n"] for row in _read(database, snapshot, outline, [asked])) == [2, 3]


@pytest.mark.versions(15)
def test_an_operator_that_no_superuser_owns_is_never_run(database: Database, roles: Roles) -> None:
    owner = roles.create("owner")
    database.execute(f"CREATE EXTENSION ltree; ALTER FUNCTION ltree_eq OWNER TO {owner}")
    database.execute(
        "CREATE TABLE t (k ltree PRIMARY KEY, n int); INSERT INTO t VALUES ('top.a', 1), ('top.b', 2)"
    )
    outline = _outline(database, "t")
    assert "OPERATOR" not in keys_statement(outline, [pa.array(["top.a"])])
    with _exported(database) as snapshot:
        assert [row["n"] for row in _read(database, snapshot, outline, [["top.a", "top.c"]])] == [1]
    database.execute("ALTER FUNCTION ltree_eq OWNER TO postgres")


@pytest.mark.versions(15)
def test_another_operator_of_the_same_name_is_not_taken_for_that_of_the_index(database: Database) -> None:
    database.execute(
        "CREATE EXTENSION citext; CREATE DOMAIN word AS citext; CREATE TABLE t (k word PRIMARY KEY); "
        "INSERT INTO t VALUES ('a')"
    )
    database.execute(
        "CREATE FUNCTION theirs(word, word) RETURNS bool LANGUAGE plpgsql AS $$ BEGIN RAISE 'run'; END $$;"
        "CREATE OPERATOR public.= (FUNCTION = theirs, LEFTARG = word, RIGHTARG = word)"
    )
    with _exported(database) as snapshot:
        assert [row["k"] for row in _read(database, snapshot, _outline(database, "t"), [["a"]])] == ["a"]


def test_N15_keys_of_a_partitioned_table_are_found_in_every_leaf(database: Database) -> None:
    database.execute("CREATE TABLE p (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)")
    database.execute(
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100); "
        "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (100) TO (200)"
    )
    database.execute("INSERT INTO p SELECT g, 'v' || g FROM generate_series(1, 199) g")
    with _exported(database) as snapshot:
        outline = _outline(database, "p")
        database.execute("DELETE FROM p WHERE id = 150")
        found = _read(database, snapshot, outline, [["50", "150", "500"]])
        assert [row["v"] for row in found] == ["v50", "v150"]
        database.execute("TRUNCATE p2")
        with pytest.raises(TableRewrittenError):
            _read(database, snapshot, outline, [["50"]])


def test_N09_the_row_filter_holds_for_keys_too(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, n text, secret text); "
        "INSERT INTO t VALUES (1, 'EU', 's'), (2, 'US', 's')"
    )
    database.execute(
        "ALTER TABLE t REPLICA IDENTITY FULL; CREATE PUBLICATION p FOR TABLE t (id, n) WHERE (n = 'EU')"
    )
    with _exported(database) as snapshot:
        found = _read(database, snapshot, _outline(database, "t", "p"), [["1", "2"]])
    assert found == [{"id": 1, "n": "EU", "_exact": None}]


def test_N08_a_chunk_gives_up_waiting_for_a_lock(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outline, "_LOCK_SECONDS", 1)
    database.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)")
    address = SourceAddress.parse(database.dsn)
    with _exported(database) as snapshot:
        with connect(address) as connection:
            (chunk,) = cut_chunks(inspect_outline(connection, _table(database, "t")), 1 << 20)
        with database.connect() as holder:
            holder.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(LockWaitError, match=r"reading public\.t"):
                list(read_chunk(address, snapshot, chunk))
        assert sum(batch.num_rows for batch in read_chunk(address, snapshot, chunk)) == 1
        deadline = time.monotonic() + 60
        while database.query("SELECT 1 FROM pg_locks WHERE relation = 't'::regclass"):
            assert time.monotonic() < deadline, "between chunks nothing is locked"
            time.sleep(0.02)


DIFFERENCES = {
    "ALTER TABLE t DROP COLUMN v; ALTER TABLE t ADD COLUMN v text": "its columns changed",
    "ALTER TABLE t ALTER v TYPE varchar(10)": "its columns changed",
    "ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t ADD PRIMARY KEY (w)": "its key changed",
    "TRUNCATE t": "it was rewritten or emptied",
    "VACUUM FULL t": "it was rewritten or emptied",
    "ALTER PUBLICATION p DROP TABLE t; ALTER PUBLICATION p ADD TABLE t WHERE (id > 0)": "it left the "
    "publication and came back",
    "ALTER PUBLICATION p SET TABLE t WHERE (id > 1)": "its row filter changed",
    "ALTER PUBLICATION p SET TABLE t (id, v) WHERE (id > 0)": "its columns changed",
    "DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, w int UNIQUE, v text)": "it was dropped and created "
    "again",
    "ALTER TABLE t ALTER w SET DEFAULT 5; UPDATE t SET id = 2; "
    "ALTER TABLE t RENAME CONSTRAINT t_pkey TO o; CREATE INDEX ON t (v)": None,
}


def test_chunks_of_two_moments_that_do_not_fit_are_detected(database: Database) -> None:
    found = {}
    for statements in DIFFERENCES:
        database.execute(
            "CREATE TABLE t (id int PRIMARY KEY, w int NOT NULL UNIQUE, v text); "
            "INSERT INTO t VALUES (1, 1, 'a')"
        )
        database.execute("CREATE PUBLICATION p FOR TABLE t WHERE (id > 0)")
        before = _outline(database, "t", "p")
        for each in statements.split("; "):
            database.execute(each)
        found[statements] = before.difference(_outline(database, "t", "p"))
        database.execute("DROP PUBLICATION p; DROP TABLE t")
    assert found == DIFFERENCES


def test_attached_and_detached_partitions_are_detected(database: Database) -> None:
    database.execute("CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    database.execute("CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)")
    before = _outline(database, "p")
    database.execute("CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (100) TO (200)")
    assert before.difference(_outline(database, "p")) == "its partitions changed"
    database.execute("DROP TABLE p2")
    assert before.difference(_outline(database, "p")) is None


@contextmanager
def _exported(database: Database) -> Iterator[str]:
    with export_snapshot(SourceAddress.parse(database.dsn)) as exported:
        yield exported.name


def _table(database: Database, name: str) -> CatalogTable:
    with connect(SourceAddress.parse(database.dsn)) as connection:
        return next(table for table in inspect_tables(connection) if table.name == TableName("public", name))


def _outline(
    database: Database, name: str, publication: str | None = None, policy: TypePolicy | None = None
) -> CopyFingerprint:
    with connect(SourceAddress.parse(database.dsn)) as connection:
        return inspect_outline(connection, _table(database, name), policy, publication).outline


def _read(
    database: Database,
    snapshot: str,
    outline: CopyFingerprint,
    texts: Sequence[Sequence[str]],
    exact: Sequence[Sequence[str | None]] | None = None,
) -> list[dict[str, Any]]:
    nothing = [[None] * len(texts[0])] * len(texts)
    columns = [tuple(pa.array(column, pa.string()) for column in part) for part in (texts, exact or nothing)]
    batches = read_keys(SourceAddress.parse(database.dsn), snapshot, outline, [KeyBatch(*columns)])
    return [row for batch in batches for row in batch.to_pylist()]
