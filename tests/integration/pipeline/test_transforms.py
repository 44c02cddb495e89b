"""Whole pipelines with transforms. Single transforms and orders of changes are tested without Spark."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from penstock.pipeline.table_states import TableState
from penstock.pipeline.verify.verify import verify_tables
from tests.support.fix_pipeline import MirrorFactory
from tests.support.fix_postgres import Database
from tests.support.pipeline.transformed import KEY, LEAVE_AND_ENTER, PEOPLE, RULE, expected, hashed, people
from tests.support.transforms.answers import ANSWERS, COLUMNS


@pytest.fixture
def hash_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASH_KEY", KEY)


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
    report = verify_tables(spark, made.config)  # which moves the pipeline to the position of the comparison
    assert report.equal, report
    assert people(made) == expected(
        ("2", "b@x", "***", "NaN"), ("4", "d@x", "***5678", "7"), ("6", None, None, "1.5")
    )
    lake = [path.read_bytes() for path in made.config.sink.root.rglob("*") if path.is_file()]
    assert not any(word in data for data in lake for word in (KEY.encode(), b"a@x", b"4111111111111111")), (
        "in the clear"
    )

    # An edited or altered transform causes a resync, and a hashed column does not appear under another name
    # (S13).
    made.path.write_text(
        made.path.read_text().replace("region = 'EU'", "region <> 'EU' OR note IS NULL"), encoding="utf-8"
    )
    database.execute(
        "ALTER TABLE people ADD note text DEFAULT 'n'; UPDATE people SET note = NULL WHERE id = 4"
    )
    made.run_once()
    assert sorted((row.region, row.note) for row in made.rows("public.people")) == [
        ("EU", None),
        ("US", "n"),
        ("US", "n"),
    ]
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
    assert sorted(rows, key=str) == expected(
        ("2", "b@x", "***", "NaN"), ("4", "d@x", "***5678", "7"), ("6", None, None, "1.5")
    )


def test_a_condition_has_the_meaning_of_spark(spark: SparkSession) -> None:
    """The results that the tests without Spark expect are those of Spark."""
    import pyarrow as pa

    frame = spark.createDataFrame(pa.table(COLUMNS))
    found = frame.selectExpr(*(f"({text}) AS `{at}`" for at, text in enumerate(ANSWERS))).toArrow()
    for at, (text, answers) in enumerate(ANSWERS.items()):
        spoken = "".join(
            "n" if value is None else "t" if value else "f" for value in found.column(at).to_pylist()
        )
        assert spoken == answers, text
