"""Random writes and random interruptions: a finished snapshot equals the source at its fence."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable

import pytest

from tests.support.snapshot.copying import Copying, Watcher
from tests.support.snapshot.tables import WIDE

RUNS = int(os.environ.get("PENSTOCK_TEST_SNAPSHOT_RUNS", "3"))

# Tables of different kinds, each with statements that change it at random; {0} is the table, {1} a number.
KINDS: dict[str, tuple[str, list[str]]] = {
    "plain": (
        (f"CREATE TABLE {{0}} (id int PRIMARY KEY, n int, v text); "
            f"INSERT INTO {{0}} SELECT g, 0, {WIDE} FROM generate_series(1, 80) g"),
        [
            "UPDATE {0} SET n = n + 1, v = 'short' WHERE id % 7 = {1} % 7",
            "DELETE FROM {0} WHERE id % 13 = {1} % 13",
            "UPDATE {0} SET id = id + 1000 + {1} WHERE id % 17 = {1} % 17 AND id < 1000",
            (f"INSERT INTO {{0}} SELECT 100000 + {{1}} * 100 + g, 0, {WIDE} FROM generate_series(1, 15) g "
                "ON CONFLICT DO NOTHING"),
            f"UPDATE {{0}} SET v = {WIDE} FROM generate_series({{1}}, {{1}} + 10) g WHERE id = g",
        ],
    ),
    "composite": (
        """CREATE TABLE {0} (a text, b numeric, big text, PRIMARY KEY (a, b));
        ALTER TABLE {0} ALTER big SET STORAGE EXTERNAL;
        INSERT INTO {0}
        SELECT 'k''"' || g % 5, g / 8.0, repeat(md5(g::text), 90) FROM generate_series(1, 40) g""",
        [
            "UPDATE {0} SET a = a || 'x' WHERE b < {1} % 7",
            "UPDATE {0} SET b = b + 0.000 WHERE b > {1} % 5",
            "UPDATE {0} SET b = b + 100 WHERE b > {1} % 5 AND b < {1} % 5 + 1",
            "DELETE FROM {0} WHERE b * 8 % 11 = {1} % 11",
            ("INSERT INTO {0} SELECT '', CASE g WHEN 1 THEN 'NaN' ELSE {1} % 9.0 END "
                "FROM generate_series(1, 2) g ON CONFLICT DO NOTHING"),
        ],
    ),
    "parted": (
        f"""CREATE TABLE {{0}} (id int, part int, v text, PRIMARY KEY (id, part)) PARTITION BY LIST (part);
        CREATE TABLE {{0}}_1 PARTITION OF {{0}} FOR VALUES IN (0);
        CREATE TABLE {{0}}_2 PARTITION OF {{0}} DEFAULT;
        INSERT INTO {{0}} SELECT g, g % 2, {WIDE} FROM generate_series(1, 60) g""",
        [
            "UPDATE {0} SET part = 1 - part WHERE id % 5 = {1} % 5",
            "DELETE FROM {0} WHERE id % 11 = {1} % 11",
            "UPDATE {0} SET v = 'x' || {1} WHERE id % 3 = {1} % 3",
            ("INSERT INTO {0} SELECT 1000 + {1} * 10 + g, g % 3, 'new' FROM generate_series(1, 6) g "
                "ON CONFLICT DO NOTHING"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("run", range(RUNS))
def test_N03_random_writes_and_interruptions_end_equal_to_the_source(copying: Copying, run: int) -> None:
    seed = int(os.environ.get("PENSTOCK_TEST_SNAPSHOT_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"PENSTOCK_TEST_SNAPSHOT_SEED={seed}")  # shown when the test fails
    choices = random.Random(seed)
    tables = {f"{kind}_{run}": kind for kind in KINDS}
    for table, kind in tables.items():
        copying.captured.execute(KINDS[kind][0].format(table))
    copying.captured.start()

    writing = threading.Lock()

    def write() -> None:
        for table in choices.sample(list(tables), choices.randrange(len(tables) + 1)):
            with writing, copying.captured.transaction():
                for _ in range(choices.randrange(1, 4)):
                    copying.captured.execute(
                        choices.choice(KINDS[tables[table]][1]).format(table, choices.randrange(1000))
                    )

    chunks, troubles = 0, list[str]()
    for _ in range(choices.randrange(2, 5)):
        watcher = Watcher()
        watcher.after_chunk = _sometimes(choices, write)
        copying.run(
            *tables, watcher=watcher, chunks=choices.randrange(1, 8), hold_seconds=choices.choice([None, 0.0])
        )
        chunks += len(watcher.read)
        write()
        troubles += watcher.troubles
    watcher, failures = copying.run(*tables)
    assert failures == {}
    assert chunks > 0
    assert not [trouble for trouble in troubles + watcher.troubles if "starts again" in trouble], (
        "nothing was rewritten"
    )
    copying.assert_exact(*tables)


def _sometimes(choices: random.Random, write: Callable[[], None]) -> Callable[[int], None]:
    return lambda _: write() if choices.random() < 0.3 else None
