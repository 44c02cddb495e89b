"""SQL transforms run by Spark: error messages, single rows, and a whole pipeline."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from penstock.errors import ConfigError
from penstock.pipeline.checks.check import check_pipeline
from penstock.pipeline.dead_letters.store import DeadLetterStore
from penstock.pipeline.table_states import TableState
from penstock.pipeline.verify.verify import verify_tables
from penstock.spark.query import VALUE, WHERE
from penstock.spark.query_plan import analyse, answer
from tests.support.fix_pipeline import Mirror, MirrorFactory
from tests.support.fix_postgres import Database
from tests.support.pipeline.transformed import ORDERS
from tests.support.transforms.answers import ANSWERS
from tests.support.transforms.answers import COLUMNS as VALUES

COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("a", pa.string()),
        ("b", pa.int32()),
        ("Odd name", pa.decimal128(10, 2)),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("list", pa.list_(pa.int32())),
    ]
)
REFUSED = {
    "SELECT sum(id) AS s FROM source": "an aggregate",
    "SELECT id FROM source GROUP BY id HAVING count(*) > 1": "an aggregate",
    "SELECT id, row_number() OVER (ORDER BY id) AS n FROM source": "a window function",
    "SELECT DISTINCT id FROM source": "DISTINCT",
    "SELECT id FROM source ORDER BY id": "ORDER BY",
    "SELECT id FROM source LIMIT 5": "LIMIT",
    "SELECT id FROM source OFFSET 5": "OFFSET",
    "SELECT explode(list) AS e FROM source": "returns several rows per row",
    "SELECT id, e FROM source LATERAL VIEW explode(list) t AS e": "returns several rows per row",
    "SELECT s.id FROM source s JOIN source t ON s.id = t.b": "a join",
    "SELECT id FROM source UNION ALL SELECT id FROM source": "UNION",
    "SELECT id FROM source TABLESAMPLE (10 PERCENT)": "TABLESAMPLE",
    "WITH x AS (SELECT * FROM source) SELECT * FROM x": "WITH",
    "SELECT id FROM source WHERE id IN (SELECT 1)": "a subquery",
    "SELECT (SELECT max(b) FROM source) AS m FROM source": "a subquery",
    "SELECT id FROM (SELECT * FROM source)": "more than columns and a condition",
    "SELECT id FROM range(3) AS source": "more than columns and a condition",
    "SELECT 1 AS one": "no table",
    "VALUES (1)": "VALUES|more than columns",
    "SELECT rand() AS r FROM source": "rand is not deterministic",
    "SELECT upper(uuid()) AS u FROM source": "uuid is not deterministic",
    "SELECT base64(aes_encrypt(a, '0000111122223333')) AS e FROM source": "aes_encrypt is not deterministic",
    "SELECT id FROM source WHERE rand() > 0.5": "rand is not deterministic",
    "SELECT current_timestamp() AS t FROM source": "depends on when",
    "SELECT now() AS t FROM source": "depends on when",
    "SELECT unix_timestamp() AS t FROM source": "depends on when",
    "SELECT id FROM source WHERE day < current_date": "depends on when",
    "SELECT current_user() AS u FROM source": "depends on when",
    "SELECT TIMESTAMP 'now' AS t FROM source": "TIMESTAMP 'now' depends on when",
    "SELECT id FROM source WHERE 'today' = a AND day < date ' Today '": "date ' Today ' depends on when",
    "SELECT reflect('java.util.UUID', 'randomUUID') AS u FROM source": "reflect is not deterministic",
    "SELECT transform(list, x -> x + rand()) AS l FROM source": "rand is not deterministic",
    "SELECT nope FROM source": "Spark says: .*nope",
    "SELECT ID FROM source": "Spark says: .*ID",
    "SELECT id + 1 AS x, x + 1 AS y FROM source": "Spark says: .*x",
    "SELEC id FROM source": "Spark says: ",
    "SELECT id FROM elsewhere": "Spark says: .*elsewhere",
    "SELECT id FROM source WERE b = 1": "Spark says: ",
    "SELECT id FROM source; DROP TABLE source": "Spark says: ",
    "DROP VIEW source": "Spark says: |more than columns",
    "SET spark.sql.ansi.enabled = false": "Spark says: |more than columns",
    "INSERT INTO source SELECT * FROM source": "Spark says: |more than columns",
    "CREATE TABLE made AS SELECT * FROM source": "Spark says: |more than columns",
    "EXECUTE IMMEDIATE 'CREATE TABLE made AS SELECT 1 AS one'": "more than columns",
    "BEGIN CREATE TABLE made AS SELECT 1 AS one; END": "more than columns",
    "CALL system.made()": "more than columns",
    "SELECT id FROM parquet.`/tmp`": "Spark says: |more than columns",
    "SELECT id FROM SOURCE": "Spark says: .*SOURCE",
}


def test_K12_only_row_wise_queries_are_accepted(spark: SparkSession) -> None:
    for text, reason in REFUSED.items():
        with pytest.raises(ConfigError, match=reason):
            analyse(spark, text, COLUMNS)
    assert not spark.catalog.tableExists("made"), "nothing is run"
    assert spark.conf.get("spark.sql.ansi.enabled") == "true"


def test_spark_reports_the_source_columns_of_each_column(spark: SparkSession) -> None:
    found = analyse(
        spark,
        "SELECT s.id AS `key`, `Odd name`, `Odd name` * b AS product, CAST(a AS int) AS n, 1 "
        "AS one, transform(list, x -> x + b) AS more, "
        "day FROM source AS s WHERE length(a) > 1 AND b = 1",
        COLUMNS,
    )
    assert [(each.name, each.needs, each.is_plain) for each in found.columns] == [
        ("key", ("id",), True),
        ("Odd name", ("Odd name",), True),
        ("product", ("Odd name", "b"), False),
        ("n", ("a",), False),
        ("one", (), False),
        ("more", ("b", "list"), False),
        ("day", ("day",), True),
    ]
    assert found.columns[2].kind.startswith('"decimal(')
    assert found.condition_columns == ("a", "b")
    assert analyse(spark, "SELECT * EXCEPT (a) FROM source", COLUMNS).condition_columns is None


def test_the_session_of_a_thread_is_the_same_after_a_query_was_analysed_in_another(
    spark: SparkSession,
) -> None:
    spark.conf.set("penstock.test.session", "the thread's")
    spark.createDataFrame([], "a int")  # which makes it the session of the thread
    analyse(spark, "SELECT id FROM source", COLUMNS)
    active = SparkSession.getActiveSession()
    assert active is not None
    assert active.conf.get("penstock.test.session", None) == "the thread's"


def test_an_error_is_that_of_its_row_and_its_column(spark: SparkSession, tmp_path: Path) -> None:
    """Also if two columns and the condition share the failing expression."""
    rows = {
        "_row": pa.array([0, 1, 2, 3], pa.int64()),
        "a": ["12", "x", None, "3"],
        "b": pa.array([0, 2, None, 2**31 - 1], pa.int32()),
        "at": pa.array(
            [datetime(1, 1, 1, tzinfo=UTC), None, None, datetime(9999, 12, 31, tzinfo=UTC)],
            pa.timestamp("us", "UTC"),
        ),
        "day": pa.array([date(1, 1, 1), None, None, date(9999, 12, 31)]),
    }
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    text = (
        "SELECT id, 10 / b AS q, 10 / b + 1 AS r, CAST(a AS int) AS n, b + 1 "
        "AS more, at + INTERVAL '0' DAY AS at, date_add(day, 0) AS day "
        "FROM source WHERE 10 / b > 1"
    )
    answer(spark, text, COLUMNS, [str(tmp_path / "rows.parquet")], str(tmp_path / "answers"))
    found = pq.read_table(tmp_path / "answers").sort_by("_row")
    answers = {
        name: [None if each is None else (each[VALUE],) for each in found.column(name).to_pylist()]
        for name in found.column_names[1:]
    }
    assert answers["1"] == [None, (5.0,), (None,), (10 / (2**31 - 1),)]
    assert answers["2"] == [None, (6.0,), (None,), (10 / (2**31 - 1) + 1,)]
    assert answers["3"] == [(12,), None, (None,), (3,)]
    assert answers["4"] == [(1,), (3,), (None,), None]
    assert answers["5"] == [(value.as_py(),) for value in rows["at"]]
    assert answers["6"] == [(value.as_py(),) for value in rows["day"]]
    assert answers[WHERE] == [None, (True,), (None,), (False,)]


def test_a_condition_alone_means_the_same_as_in_spark(spark: SparkSession, tmp_path: Path) -> None:
    table = pa.table({**VALUES, "_row": pa.array(range(5), pa.int64())})
    pq.write_table(table, tmp_path / "rows.parquet")
    columns = pa.schema([(name, values.type) for name, values in VALUES.items()])
    made = ", ".join(f"({text}) AS c{at}" for at, text in enumerate(ANSWERS) if text != "b")
    answer(
        spark,
        f"SELECT {made} FROM source",
        columns,
        [str(tmp_path / "rows.parquet")],
        str(tmp_path / "answers"),
    )
    found = pq.read_table(tmp_path / "answers").sort_by("_row")
    spoken = {
        text: "".join(
            "n" if each[VALUE] is None else "t" if each[VALUE] else "f"
            for each in found.column(str(at)).to_pylist()
        )
        for at, text in enumerate(text for text in ANSWERS if text != "b")
    }
    assert spoken == {text: answers for text, answers in ANSWERS.items() if text != "b"}


RULE = {
    "table": "public.orders",
    "sql": "SELECT note AS remark, id AS order_id, CAST(price AS decimal(10,2)) * qty "
    "AS total, length(long) AS size, long FROM source "
    "WHERE qty % 2 = 0",
}


def orders(made: Mirror) -> list[tuple[object, ...]]:
    return sorted(
        tuple(row) for row in made.rows("public.orders", "order_id, remark, total, size, substring(long,1,1)")
    )


def test_K12_S13_a_table_is_the_result_of_its_query(
    spark: SparkSession, database: Database, mirror: MirrorFactory
) -> None:
    database.execute(ORDERS)
    made = mirror(tables=[RULE], refused="dead_letters")
    report = check_pipeline(made.path)
    assert not [finding for step in report.steps for finding in step.problems], report
    made.run_once()
    assert orders(made) == [
        (at, f"note {at}", Decimal(at) * Decimal(f"{at}.50"), 5000, letter)
        for at, letter in ((2, "b"), (4, "d"), (6, "f"))
    ]

    database.execute("UPDATE orders SET qty = 3 WHERE id = 2")  # leaves
    database.execute("UPDATE orders SET qty = 8, long = 'zz' WHERE id = 1")  # comes in
    database.execute("UPDATE orders SET price = '1.00' WHERE id = 4")  # the long text is unchanged TOAST
    database.execute("UPDATE orders SET price = 'free' WHERE id = 6")  # is refused
    database.execute("INSERT INTO orders VALUES (7, '7', 1, NULL, NULL), (8, '0.25', 2, NULL, 'n')")
    made.run_once()
    assert orders(made) == [
        (1, "note 1", Decimal("12.00"), 2, "z"),
        (4, "note 4", Decimal("4.00"), 5000, "d"),
        (6, "note 6", Decimal("39.00"), 5000, "f"),
        (8, None, Decimal("0.50"), 1, "n"),
    ]
    (names,) = [
        DeadLetterStore(made.config.sink.root, made.config.pipeline).open_names(name)
        for name in made.config.named_tables
    ]
    assert len(names) == 2, "one was refused when the table was copied"

    database.execute(
        "UPDATE orders SET price = '2', long = 'g' WHERE id = 6; DELETE FROM orders WHERE id = 8"
    )
    verified = verify_tables(spark, made.config)
    assert verified.equal_but_held, verified
    assert [each.comparison.held for each in verified.verdicts if each.comparison is not None] == [1]
    assert orders(made)[-1] == (6, "note 6", Decimal("12.00"), 1, "g")

    # A dropped column stops the table, whatever it is called in the target (S13).
    database.execute("ALTER TABLE orders RENAME price TO cost; UPDATE orders SET qty = 10 WHERE id = 1")
    status = made.run_once().tables["public.orders"]
    assert status.state is TableState.FAILED
    assert "price" in (status.reason or "")


def test_a_check_starts_spark_for_a_query_only_and_reports_its_errors(
    database: Database, mirror: MirrorFactory
) -> None:
    database.execute(ORDERS)
    made = mirror(tables=[{"table": "public.orders", "sql": "SELECT count(*) AS n FROM source"}])
    code = (
        "import sys; from pathlib import Path; from penstock.pipeline.checks.check import check_pipeline "
        "as c; "
        f"print(*(each.what for each in c(Path({str(made.path)!r})).problems)); "
        "from pyspark import SparkContext; assert SparkContext._active_spark_context is None"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "it has an aggregate" in done.stdout
