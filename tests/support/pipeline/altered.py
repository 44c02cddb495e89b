"""Schema changes (edge cases S) per table, for every sink, applied while the pipeline is stopped and while it
runs.

`{}` stands for the table. Of what is done while the pipeline runs, one statement of every table comes before
the next of any.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PLAIN = (
    "CREATE TABLE {} (id int PRIMARY KEY, a text, b int); INSERT INTO {} VALUES (1, 'one', 1), (2, 'two', 2)"
)
PARTED = (
    "CREATE TABLE {} (id int PRIMARY KEY, a text, b int) PARTITION BY RANGE (id); "
    "CREATE TABLE {}_rest PARTITION OF {} DEFAULT;"
    "CREATE TABLE {}_low PARTITION OF {} FOR VALUES FROM (0) TO (10); "
    "INSERT INTO {} VALUES (1, 'one', 1), (50, 'fifty', 50)"
)
HEAP = (
    "CREATE TABLE {} (a text NOT NULL, b int); CREATE UNIQUE INDEX ON {} (lower(a)); "
    "ALTER TABLE {} REPLICA IDENTITY FULL;"
    "INSERT INTO {} VALUES ('A', 1), ('b', NULL)"
)
UNKEYED = (
    "CREATE TABLE {} (id int NOT NULL, a text, b int); ALTER TABLE {} REPLICA IDENTITY FULL;"
    "INSERT INTO {} VALUES (1, 'one', 1), (2, 'two', 2)"
)
SIZED = (
    "CREATE TABLE {} (id int PRIMARY KEY, a varchar(4), b numeric(6, 2)); "
    "INSERT INTO {} VALUES (1, 'one', 1.25), (2, 'two', 2)"
)
LONG = (
    "CREATE TABLE {} (id int PRIMARY KEY, a text, b int);"
    "INSERT INTO {} SELECT g, repeat(md5(g::text), 20), g FROM generate_series(1, 1000) g"
)
"""In chunks of 64 kB, a dozen of them."""
TYPED = (
    "CREATE TYPE {}_word AS ENUM ('one', 'two'); CREATE TYPE {}_pair AS (x int, y {}_word);"
    "CREATE TABLE {} (id int, a {}_word, b {}_pair, PRIMARY KEY (id, a));"
    "INSERT INTO {} VALUES (1, 'one', '(1,one)'), (2, 'two', '(2,two)')"
)
SHARDS = (
    "CREATE TABLE {}_1 (id int PRIMARY KEY, a text, b int, big text); "
    "ALTER TABLE {}_1 ALTER big SET STORAGE EXTERNAL;"
    "CREATE TABLE {}_2 (LIKE {}_1 INCLUDING ALL);"
    "INSERT INTO {}_1 SELECT g, 'one', g, repeat(md5('one' || g), 100) FROM generate_series(1, 2) g;"
    "INSERT INTO {}_2 SELECT g, 'two', g, repeat(md5('two' || g), 100) FROM generate_series(1, 2) g"
)


@dataclass(frozen=True)
class Case:
    statements: Sequence[str]
    create: str = PLAIN
    rule: Mapping[str, Any] = field(default_factory=dict)
    """The entry of the table in `tables:`."""


FOLLOWED = {
    "s01_s10_added": Case(
        (
            "INSERT INTO {} VALUES (3, 'before', 3)",
            "ALTER TABLE {} ADD x int, ADD y int DEFAULT 5, ADD z text NOT NULL DEFAULT 'it''s'",
            "UPDATE {} SET a = 'changed', y = 6 WHERE id = 1",
            "ALTER TABLE {} ALTER b SET DEFAULT 5, ALTER b SET NOT NULL; INSERT INTO {} (id) VALUES (4)",
            (
                "ALTER TABLE {} ALTER b DROP DEFAULT, ALTER b DROP NOT NULL, ALTER y SET DEFAULT 9; "
                "INSERT INTO {} (id) VALUES (5)"
            ),
            "DELETE FROM {} WHERE id = 3",
        )
    ),
    "s02_dropped": Case(
        (
            "ALTER TABLE {} DROP a",
            "UPDATE {} SET b = 7 WHERE id = 1",
            "ALTER TABLE {} ADD a date; ALTER TABLE {} RENAME id TO key",
            "INSERT INTO {} VALUES (3, 3, now())",
        )
    ),
    "s03_s04_renamed": Case(
        (
            "ALTER TABLE {} RENAME b TO last",
            (
                "BEGIN; INSERT INTO {} VALUES (3, 'c', 3); ALTER TABLE {} ALTER last TYPE bigint; "
                "INSERT INTO {} VALUES (4, 'd', 5e9); COMMIT"
            ),
            (
                "ALTER TABLE {} RENAME a TO swap; ALTER TABLE {} RENAME last TO a; "
                "ALTER TABLE {} RENAME swap TO last"
            ),
            "UPDATE {} SET last = 'text', a = 9 WHERE id = 2",
        )
    ),
    "s04_longer": Case(
        (
            "ALTER TABLE {} ALTER a TYPE varchar(20), ALTER b TYPE numeric(12, 2)",
            "INSERT INTO {} VALUES (3, 'much longer', 1234567890.25)",
            "ALTER TABLE {} ALTER a TYPE text; UPDATE {} SET a = repeat('x', 50) WHERE id = 1",
        ),
        SIZED,
    ),
    "s05_mixed": Case(
        (
            (
                "BEGIN; INSERT INTO {} VALUES (3, 'c', 3); ALTER TABLE {} ADD c int DEFAULT 3; "
                "UPDATE {} SET a = 'x' WHERE id = 1; COMMIT"
            ),
            "BEGIN; ALTER TABLE {} ADD lost int; INSERT INTO {} VALUES (5, 'gone', 3, 3); ROLLBACK",
            "ALTER TABLE {} ADD d int; ALTER TABLE {} ADD e int DEFAULT 8; ALTER TABLE {} RENAME a TO z",
            "UPDATE {} SET d = 9 WHERE id = 1",
        )
    ),
    "s06_idle": Case(
        ("ALTER TABLE {} ADD x int DEFAULT 7; ALTER TABLE {} ADD y text; ALTER TABLE {} RENAME a TO c",)
    ),
    "s06_lagging": Case(
        (
            "INSERT INTO {} VALUES (3, 'c', 3); ALTER TABLE {} ADD c int DEFAULT 5",
            "UPDATE {} SET b = 4 WHERE id = 3; ALTER TABLE {} RENAME a TO z",
            "ALTER TABLE {} ADD d int; ALTER TABLE {} RENAME b TO a; INSERT INTO {} VALUES (4, 'd', 4, 4, 4)",
            "DELETE FROM {} WHERE id = 2; UPDATE {} SET a = 9 WHERE id = 1",
        )
    ),
    "s11_heap": Case(
        (
            "ALTER TABLE {} ADD c int DEFAULT 5",
            "DELETE FROM {} WHERE a = 'A'; UPDATE {} SET b = 2",
            "INSERT INTO {} VALUES ('c', 3)",
        ),
        HEAP,
    ),
    "s12_parts": Case(
        (
            "INSERT INTO {} VALUES (11, 'eleven', 11)",
            "ALTER TABLE {} ADD c int DEFAULT 5; UPDATE {} SET id = 15 WHERE id = 1",
            "ALTER TABLE {} RENAME b TO d; INSERT INTO {} VALUES (2, 'two', 2, 2)",
        ),
        PARTED,
    ),
    "r12_all_parts": Case(("TRUNCATE {}; INSERT INTO {} VALUES (3, 'three', 3)",), PARTED),
    "r12_rewritten": Case(("VACUUM FULL {}_low", "INSERT INTO {} VALUES (3, 'three', 3)"), PARTED),
    "s12_created": Case(
        (
            "CREATE TABLE {}_next PARTITION OF {} FOR VALUES FROM (100) TO (110) PARTITION BY RANGE (id)",
            (
                "CREATE TABLE {}_sub PARTITION OF {}_next FOR VALUES FROM (100) TO (105); "
                "INSERT INTO {} VALUES (101, 'a', 1), (102, 'b', 2)"
            ),
            (
                "UPDATE {} SET id = 103 WHERE id = 50; ALTER TABLE {} RENAME b TO d; "
                "UPDATE {} SET d = 3 WHERE id = 101"
            ),
        ),
        PARTED,
    ),
    "s15_label_added": Case(
        ("ALTER TYPE {}_word ADD VALUE 'zero' BEFORE 'one'", "INSERT INTO {} VALUES (3, 'zero', '(3,zero)')"),
        TYPED,
    ),
    "s15_attribute_renamed": Case(
        ("ALTER TYPE {}_pair RENAME ATTRIBUTE x TO z", "UPDATE {} SET b = '(5,two)' WHERE id = 1"), TYPED
    ),
    "s13_additive": Case(
        ("ALTER TABLE {} ADD c int DEFAULT 4; UPDATE {} SET c = 5 WHERE b = 1",),
        rule={"schema_changes": "additive"},
    ),
}
COPIED = {
    "s04_using": Case(("ALTER TABLE {} ALTER a TYPE int USING length(a)",)),
    "s04_narrower": Case(("ALTER TABLE {} ALTER b TYPE smallint", "INSERT INTO {} VALUES (3, 'c', 3)")),
    "s04_scale": Case(
        ("ALTER TABLE {} ALTER b TYPE numeric(8, 4)", "UPDATE {} SET b = 1.2345 WHERE id = 1"), SIZED
    ),
    "s07_recreated": Case(
        (
            (
                "DROP TABLE {}; CREATE TABLE {} (id int PRIMARY KEY, a text, b int); "
                "INSERT INTO {} VALUES (9, 'z', 9)"
            ),
        )
    ),
    "r12_one_part": Case(
        ("TRUNCATE {}_low; INSERT INTO {} VALUES (3, 'three', 3), (51, 'more', 51)",), PARTED
    ),
    "s09_key": Case(
        (
            (
                "ALTER TABLE {} DROP CONSTRAINT {}_pkey, ADD PRIMARY KEY (b, id); UPDATE {} SET a = 'x'; "
                "INSERT INTO {} VALUES (1, 'y', 7)"
            ),
        )
    ),
    "s09_keyed": Case(
        (
            "ALTER TABLE {} ADD PRIMARY KEY (id)",
            (
                "ALTER TABLE {} REPLICA IDENTITY DEFAULT; UPDATE {} SET a = 'x' WHERE id = 1; "
                "INSERT INTO {} VALUES (3, 'c', 3)"
            ),
        ),
        UNKEYED,
    ),
    "s09_unkeyed": Case(
        (
            "ALTER TABLE {} REPLICA IDENTITY FULL; ALTER TABLE {} DROP CONSTRAINT {}_pkey",
            "INSERT INTO {} VALUES (2, 'two', 2), (2, 'two', 2); DELETE FROM {} WHERE id = 1",
        )
    ),
    "s12_detached": Case(("ALTER TABLE {} DETACH PARTITION {}_low",), PARTED),
    "s12_attached": Case(
        (
            (
                "CREATE TABLE {}_more (LIKE {} INCLUDING ALL); "
                "INSERT INTO {}_more VALUES (200, 'more', 200), (205, 'still', 205);"
                "ALTER TABLE {} ATTACH PARTITION {}_more FOR VALUES FROM (200) TO (210)"
            ),
            "UPDATE {} SET b = 201 WHERE id = 200; INSERT INTO {} VALUES (201, 'next', 201)",
        ),
        PARTED,
    ),
    "s15_label_renamed": Case(
        (
            "ALTER TYPE {}_word RENAME VALUE 'one' TO 'uno'",
            "DELETE FROM {} WHERE a = 'uno'; INSERT INTO {} VALUES (3, 'uno', '(3,uno)')",
        ),
        TYPED,
    ),
    "s15_attribute_added": Case(("ALTER TYPE {}_pair ADD ATTRIBUTE z text",), TYPED),
    "s15_attribute_dropped": Case(
        ("ALTER TYPE {}_pair DROP ATTRIBUTE x", "UPDATE {} SET b = '(one)' WHERE id = 2"), TYPED
    ),
    "s13_masked": Case(
        ("ALTER TABLE {} ADD c int DEFAULT 4; UPDATE {} SET c = 5, a = 'masked' WHERE b = 1",),
        rule={"columns": {"mask": {"a": {"first": 1}}}},
    ),
}
ROUTED = {
    "s13_k11_shards": Case(
        (
            (
                "UPDATE {}_1 SET a = 'soon' WHERE id = 2; UPDATE {}_2 SET id = 30 WHERE id = 2; "
                "TRUNCATE {}_1; INSERT INTO {}_1 VALUES (2)"
            ),
            (
                "ALTER TABLE {}_1 ADD c int DEFAULT 5; ALTER TABLE {}_2 ADD c int DEFAULT 5;"
                "UPDATE {}_1 SET b = 3 WHERE id = 2; DELETE FROM {}_2 WHERE id = 1"
            ),
            (
                "CREATE TABLE {}_3 (LIKE {}_1 INCLUDING ALL); "
                "INSERT INTO {}_3 VALUES (1, 'three', 1), (2, 'three', 2)"
            ),
        ),
        SHARDS,
    ),
}
"""Routed into one table of the schema lake."""
GONE = {
    "s07_dropped": Case(("INSERT INTO {} VALUES (3, 'last', 3); DROP TABLE {}",)),
    "s07_renamed": Case(
        (
            "DELETE FROM {} WHERE id = 1; ALTER TABLE {} RENAME TO {}_on",
            "INSERT INTO {}_on VALUES (3, 'on', 3)",
        )
    ),
    "s07_moved": Case(
        (
            (
                "INSERT INTO {} VALUES (3, 'last', 3); CREATE SCHEMA IF NOT EXISTS elsewhere; "
                "ALTER TABLE {} SET SCHEMA elsewhere"
            ),
            "INSERT INTO elsewhere.{} VALUES (4, 'elsewhere', 4)",
        )
    ),
}
LATER = {
    "s08_created": Case(
        (
            (
                "CREATE TABLE {} (id int PRIMARY KEY); INSERT INTO {} VALUES (1); "
                "ALTER TABLE {} ADD a int DEFAULT 2"
            ),
            "INSERT INTO {} VALUES (2)",
        )
    )
}
REFUSED = {
    "s13_stop": Case(
        ("ALTER TABLE {} ADD c int; INSERT INTO {} VALUES (3, 'c', 3, 3)",), rule={"schema_changes": "stop"}
    ),
    "s13_subtractive": Case(
        ("ALTER TABLE {} RENAME a TO z; UPDATE {} SET b = 3 WHERE id = 1",),
        rule={"schema_changes": "additive"},
    ),
    "s13_unmasked": Case(
        ("ALTER TABLE {} RENAME a TO z; UPDATE {} SET b = 3 WHERE id = 1",),
        rule={"columns": {"mask": {"a": {"first": 1}}}},
    ),
    "s15_soft_delete": Case(
        ("ALTER TYPE {}_word RENAME VALUE 'one' TO 'uno'",), TYPED, {"mode": "soft_delete"}
    ),
    "s04_history": Case(
        ("ALTER TABLE {} ALTER a TYPE int USING length(a); INSERT INTO {} VALUES (3, 4, 3)",),
        rule={"mode": "history"},
    ),
}
"""Tables whose targets stay unchanged."""
IGNORED = {
    "s13_ignore": Case(
        ("ALTER TABLE {} ADD c int; ALTER TABLE {} RENAME a TO z; INSERT INTO {} VALUES (3, 'c', 3, 3)",),
        rule={"schema_changes": "ignore"},
    )
}
_KEPT = (
    "INSERT INTO {} VALUES (3, 'c', 3); UPDATE {} SET a = 'uno' WHERE id = 1",
    "ALTER TABLE {} ADD c int DEFAULT 5; UPDATE {} SET b = 7 WHERE id = 1",
    "ALTER TABLE {} DROP a; UPDATE {} SET b = 8 WHERE id = 2",
    "ALTER TABLE {} RENAME b TO d; INSERT INTO {} VALUES (4, 4, 4)",
    "DELETE FROM {} WHERE id = 3",
)
MODES = {
    f"s01_s02_s03_{mode}": Case(_KEPT, rule={"mode": mode}) for mode in ("history", "soft_delete", "append")
}
_WHILE_COPIED = (
    (
        "INSERT INTO {} VALUES (-1, 'c', 3); ALTER TABLE {} ADD c int DEFAULT 5; ALTER TABLE {} DROP a; "
        "UPDATE {} SET b = 4 WHERE id = 1"
    ),
)
DURING = {
    "s14_copied": Case(_WHILE_COPIED),
    "s14_resynced": Case(_WHILE_COPIED),
    "s14_joined": Case(_WHILE_COPIED),
}
"""Altered while they are copied: in the first snapshot, in a resync, or while other tables are streaming."""
HALVED = {"s14_halved": Case(_WHILE_COPIED, LONG)}
"""Altered while no pipeline runs and half of the table is copied."""


def live(name: str) -> str:
    """The table that is altered in the same way while the pipeline runs."""
    return f"live_{name}"


def statements(name: str, case: Case) -> list[str]:
    return [each.replace("{}", name) for each in case.statements]


def case_id(name: str) -> str:
    """Edge case S01."""
    return re.sub(r"(?<![a-z])[sk]\d\d", lambda found: found[0].upper(), name)


def rules(cases: Mapping[str, Case], routed: Iterable[str]) -> list[dict[str, Any]]:
    names = {each: case for name, case in cases.items() for each in (name, live(name))}
    into = [
        {"match": f"public.{each}_?", "into": f"lake.{each}"}
        for name in routed
        for each in (name, live(name))
    ]
    return [*({"table": f"public.{name}", **case.rule} for name, case in names.items() if case.rule), *into]
