"""Whole pipelines with transforms. What single transforms make of values, and of every order of changes, the tests without Spark say."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from pyspark.sql import SparkSession

from penstock.pipeline.states import TableState
from penstock.pipeline.verification.verify import verify_tables
from tests.fix_pipeline import Mirror, MirrorFactory
from tests.fix_postgres import Database
from tests.unit.test_transforms import ANSWERS, COLUMNS

KEY = "a long random text"
PEOPLE = """
    CREATE TABLE people (id int PRIMARY KEY, email text, region text, card text, pay numeric, tags text[], secret text);
    INSERT INTO people VALUES
        (1, 'a@x', 'EU', '4111111111111111', 5, '{q,r}', 's1'), (2, 'b@x', 'US', '42', 'NaN', NULL, 's2'),
        (3, NULL, 'EU', NULL, 1.50, '{}', 's3')
"""
RULE = {
    "table": "public.people",
    "columns": {
        "drop": ["secret"],
        "rename": {"card": "card_end"},
        "hash": ["id", "email", "pay", "tags"],
        "mask": {"card": {"last": 4}},
    },
    "where": "region = 'EU'",
}
LEAVE_AND_ENTER = """
    UPDATE people SET region = 'US' WHERE id = 1;
    UPDATE people SET region = 'EU' WHERE id = 2;
    INSERT INTO people VALUES (4, 'd@x', 'EU', '12345678', 7, NULL, 's4'), (5, 'e@x', 'US', NULL, NULL, NULL, 's5');
    UPDATE people SET id = 6 WHERE id = 3
"""


def hashed(text: str) -> str:
    return hmac.new(KEY.encode(), text.encode(), hashlib.sha256).hexdigest()


@pytest.fixture
def hash_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASH_KEY", KEY)


def people(made: Mirror) -> list[tuple[object, ...]]:
    rows = made.rows("public.people", "id, email, region, card_end, pay")
    return sorted((tuple(row) for row in rows), key=str)


def expected(*rows: tuple[str, str | None, str | None, str | None]) -> list[tuple[object, ...]]:
    made = [(hashed(key), email and hashed(email), "EU", card, pay and hashed(pay)) for key, email, card, pay in rows]
    return sorted(made, key=str)


@pytest.mark.usefixtures("hash_key")
def test_K12_K13_rows_come_and_go_by_a_filter_and_only_hashes_of_columns_arrive(
    spark: SparkSession, database: Database, mirror: MirrorFactory
) -> None:
    database.execute(PEOPLE)
    made = mirror(tables=[RULE], hash_key={"env": "HASH_KEY"})
    made.run_once()
    assert people(made) == expected(("1", "a@x", "***1111", "5"), ("3", None, None, "1.5"))
    (tags,) = [row.tags for row in made.rows("public.people") if row.tags]
    assert tags == [hashed("q"), hashed("r")]

    database.execute(LEAVE_AND_ENTER)
    report = verify_tables(spark, made.config)  # which has the pipeline come to where it compares
    assert report.equal, report
    assert people(made) == expected(("2", "b@x", "***", "NaN"), ("4", "d@x", "***5678", "7"), ("6", None, None, "1.5"))
    lake = [path.read_bytes() for path in made.config.sink.root.rglob("*") if path.is_file()]
    assert not any(word in data for data in lake for word in (KEY.encode(), b"a@x", b"4111111111111111")), "in the clear"

    # What is edited, or altered, makes a new copy; and a column that is hashed does not slip through under another name (S13).
    made.path.write_text(made.path.read_text().replace("region = 'EU'", "region <> 'EU' OR note IS NULL"), encoding="utf-8")
    database.execute("ALTER TABLE people ADD note text DEFAULT 'n'; UPDATE people SET note = NULL WHERE id = 4")
    made.run_once()
    assert sorted((row.region, row.note) for row in made.rows("public.people")) == [("EU", None), ("US", "n"), ("US", "n")]
    database.execute("ALTER TABLE people RENAME email TO mail; UPDATE people SET note = 'o' WHERE id = 4")
    status = made.run_once().tables["public.people"]
    assert status.state is TableState.FAILED
    assert "no column 'email'" in (status.reason or "")


@pytest.mark.usefixtures("hash_key")
def test_K12_K13_the_same_into_another_postgres(
    spark: SparkSession, database: Database, target_database: Database, mirror: MirrorFactory
) -> None:
    database.execute(PEOPLE)
    made = mirror(
        sink={"postgres": {"dsn": target_database.dsn}},
        tables=[{**RULE, "columns": {**RULE["columns"], "cast": {"region": "string"}}}],  # type: ignore[dict-item]
        hash_key={"env": "HASH_KEY"},
    )
    made.run_once()
    database.execute(LEAVE_AND_ENTER)
    report = verify_tables(spark, made.config)
    assert report.equal, report
    rows = target_database.query("SELECT id, email, region, card_end, pay FROM people")
    assert sorted(rows, key=str) == expected(("2", "b@x", "***", "NaN"), ("4", "d@x", "***5678", "7"), ("6", None, None, "1.5"))


def test_a_condition_means_what_spark_means_by_it(spark: SparkSession) -> None:
    """The answers that the tests without Spark hold us to are Spark's own."""
    import pyarrow as pa

    frame = spark.createDataFrame(pa.table(COLUMNS))
    found = frame.selectExpr(*(f"({text}) AS `{at}`" for at, text in enumerate(ANSWERS))).toArrow()
    for at, (text, answers) in enumerate(ANSWERS.items()):
        spoken = "".join("n" if value is None else "t" if value else "f" for value in found.column(at).to_pylist())
        assert spoken == answers, text
