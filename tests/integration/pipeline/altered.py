"""What is done to tables in EDGE_CASES S, table by table: the same for every sink. `{}` stands for the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PLAIN = "CREATE TABLE {} (id int PRIMARY KEY, a text, b int); INSERT INTO {} VALUES (1, 'one', 1), (2, 'two', 2)"
PARTED = (
    "CREATE TABLE {} (id int PRIMARY KEY, a text, b int) PARTITION BY RANGE (id); CREATE TABLE {}_rest PARTITION OF {} DEFAULT;"
    "CREATE TABLE {}_low PARTITION OF {} FOR VALUES FROM (0) TO (10); INSERT INTO {} VALUES (1, 'one', 1), (50, 'fifty', 50)"
)
HEAP = (
    "CREATE TABLE {} (a text NOT NULL, b int); CREATE UNIQUE INDEX ON {} (lower(a)); ALTER TABLE {} REPLICA IDENTITY FULL;"
    "INSERT INTO {} VALUES ('A', 1), ('b', NULL)"
)


@dataclass(frozen=True)
class Case:
    statements: Sequence[str]
    create: str = PLAIN


FOLLOWED = {
    "s01_s10_added": Case(
        (
            "INSERT INTO {} VALUES (3, 'before', 3)",
            "ALTER TABLE {} ADD x int, ADD y int DEFAULT 5, ADD z text NOT NULL DEFAULT 'it''s'",
            "UPDATE {} SET a = 'changed', y = 6 WHERE id = 1",
            "ALTER TABLE {} ALTER b SET DEFAULT 5, ALTER id SET NOT NULL",
            "INSERT INTO {} (id) VALUES (4)",
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
            "BEGIN; INSERT INTO {} VALUES (3, 'c', 3); ALTER TABLE {} ALTER last TYPE bigint; INSERT INTO {} VALUES (4, 'd', 5e9); COMMIT",
            "ALTER TABLE {} RENAME a TO swap; ALTER TABLE {} RENAME last TO a; ALTER TABLE {} RENAME swap TO last",
            "UPDATE {} SET last = 'text', a = 9 WHERE id = 2",
        )
    ),
    "s05_mixed": Case(
        (
            "BEGIN; INSERT INTO {} VALUES (3, 'c', 3); ALTER TABLE {} ADD c int DEFAULT 3; UPDATE {} SET a = 'x' WHERE id = 1; COMMIT",
            "BEGIN; ALTER TABLE {} ADD lost int; INSERT INTO {} VALUES (5, 'gone', 3, 3); ROLLBACK",
            "ALTER TABLE {} ADD d int; ALTER TABLE {} ADD e int DEFAULT 8; ALTER TABLE {} RENAME a TO z",
            "UPDATE {} SET d = 9 WHERE id = 1",
        )
    ),
    "s06_idle": Case(("ALTER TABLE {} ADD x int DEFAULT 7; ALTER TABLE {} ADD y text; ALTER TABLE {} RENAME a TO c",)),
    "s11_heap": Case(
        ("ALTER TABLE {} ADD c int DEFAULT 5", "DELETE FROM {} WHERE a = 'A'; UPDATE {} SET b = 2", "INSERT INTO {} VALUES ('c', 3)"), HEAP
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
}
COPIED = {
    "s04_using": Case(("ALTER TABLE {} ALTER a TYPE int USING length(a)",)),
    "s07_recreated": Case(("DROP TABLE {}; CREATE TABLE {} (id int PRIMARY KEY, a text, b int); INSERT INTO {} VALUES (9, 'z', 9)",)),
    "r12_one_part": Case(("TRUNCATE {}_low; INSERT INTO {} VALUES (3, 'three', 3), (51, 'more', 51)",), PARTED),
    "s12_moved": Case(("ALTER TABLE {} DETACH PARTITION {}_low",), PARTED),
    "s09_key": Case(
        ("ALTER TABLE {} DROP CONSTRAINT {}_pkey, ADD PRIMARY KEY (b, id); UPDATE {} SET a = 'x'; INSERT INTO {} VALUES (1, 'y', 7)",)
    ),
}
GONE = {
    "s07_dropped": Case(("INSERT INTO {} VALUES (3, 'last', 3); DROP TABLE {}",)),
    "s07_renamed": Case(("DELETE FROM {} WHERE id = 1; ALTER TABLE {} RENAME TO {}_on", "INSERT INTO {}_on VALUES (3, 'on', 3)")),
}
LATER = {"s08_created": Case(("CREATE TABLE {} (id int PRIMARY KEY); INSERT INTO {} VALUES (1); ALTER TABLE {} ADD a int DEFAULT 2",))}
DURING = {
    "s14_copied": Case(
        ("INSERT INTO {} VALUES (3, 'c', 3); ALTER TABLE {} ADD c int DEFAULT 5; ALTER TABLE {} DROP a; UPDATE {} SET b = 4 WHERE id = 1",)
    ),
}
"""While they are copied for the first time."""
POLICIES = {
    "s13_stop": ("stop", Case(("ALTER TABLE {} ADD c int; INSERT INTO {} VALUES (3, 'c', 3, 3)",))),
    "s13_additive": ("additive", Case(("ALTER TABLE {} ADD c int DEFAULT 4; UPDATE {} SET c = 5 WHERE b = 1",))),
    "s13_ignore": ("ignore", Case(("ALTER TABLE {} ADD c int; ALTER TABLE {} RENAME a TO z; INSERT INTO {} VALUES (3, 'c', 3, 3)",))),
}
LIVE = (
    "ALTER TABLE s01_s10_added ADD live int DEFAULT 3; UPDATE s01_s10_added SET live = 4 WHERE id = 1",
    "ALTER TABLE s01_s10_added DROP x; ALTER TABLE s01_s10_added RENAME live TO alive; INSERT INTO s01_s10_added (id) VALUES (100)",
    "ALTER TABLE s06_idle ADD z int DEFAULT 1",
    "CREATE TABLE s12_next PARTITION OF s12_parts FOR VALUES FROM (100) TO (110); INSERT INTO s12_parts (id) VALUES (101), (102)",
    "INSERT INTO s05_mixed (id) VALUES (100); CREATE SCHEMA elsewhere; ALTER TABLE s05_mixed SET SCHEMA elsewhere",
    "INSERT INTO elsewhere.s05_mixed (id) VALUES (101); CREATE TABLE s08_live (id int PRIMARY KEY)",
    "INSERT INTO r12_rewritten VALUES (4, 'four', 4); TRUNCATE r12_rewritten_low; INSERT INTO r12_rewritten VALUES (5, 'five', 5)",
)


def statements(name: str, case: Case) -> list[str]:
    return [each.replace("{}", name) for each in case.statements]
