"""Comparison of two tables, on frames built by hand: which differences it reports and which it ignores."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from penstock.pipeline.verify.compare import (
    EXAMPLES,
    ColumnDifference,
    Comparison,
    RowDifference,
    TableComparer,
)
from penstock.schema import Column, TableName, TableSchema

_SHAPE = {
    "d": "double",
    "f": "float",
    "x": "string",
    "y": "string",
    "a": "array<string>",
    "aa": "array<array<int>>",
    "ab": "array<array<boolean>>",
    "ad": "array<double>",
    "m": "map<string,string>",
    "s": "struct<one:int,two:double>",
    "b": "binary",
    "n": "decimal(10,2)",
    "_exact": "map<string,string>",
}


def _schema(columns: Sequence[str], key: Sequence[str]) -> TableSchema:
    return TableSchema(
        1, TableName("public", "t"), tuple(Column(name, pa.null(), 0) for name in columns), tuple(key)
    )


def _compare(source: DataFrame, target: DataFrame, *key: str) -> Comparison:
    columns = [name for name in source.columns if name != "_exact"]
    types = {field.name: field.dataType for field in target.schema}
    return TableComparer(_schema(columns, key), types).compare(source, target)


def _rows(spark: SparkSession, rows: Sequence[dict[str, str]]) -> DataFrame:
    """Each row as expressions by column; other columns are null."""
    casts = [
        ", ".join(f"CAST({row.get(name, 'NULL')} AS {kind})" for name, kind in _SHAPE.items()) for row in rows
    ]
    values = ", ".join(f"({at}L, {each})" for at, each in enumerate(casts))
    return spark.sql(f"SELECT * FROM VALUES {values} AS t (id, {', '.join(_SHAPE)})")


APART: list[tuple[str, dict[str, str], dict[str, str]]] = [
    ("d", {"d": "0D"}, {"d": "-0D"}),
    ("d", {"d": "double('NaN')"}, {}),
    ("f", {"f": "float('-0')"}, {"f": "float('0')"}),
    ("x y", {"x": "'v'"}, {"y": "'v'"}),
    ("x", {"x": "''"}, {}),
    ("x", {"x": "'v'"}, {"x": "'v '"}),
    ("a", {"a": "array(null, 'v')"}, {"a": "array('v', null)"}),
    ("a", {"a": "array()"}, {}),
    ("a", {"a": "array()"}, {"a": "array(null)"}),
    ("aa", {"aa": "array(array(1), array(2))"}, {"aa": "array(array(1, 2))"}),
    ("aa", {"aa": "array(array(), array(1))"}, {"aa": "array(array(1), array())"}),
    ("ab", {"ab": "array(array(), array(false))"}, {"ab": "array(array(false), array())"}),
    ("ad", {"ad": "array(0D)"}, {"ad": "array(-0D)"}),
    ("m", {"m": "map('k', null)"}, {"m": "map()"}),
    ("m", {"m": "map('k', 'v')"}, {"m": "map('v', 'k')"}),
    ("s", {"s": "named_struct('one', null, 'two', null)"}, {}),
    ("s", {"s": "named_struct('one', 1, 'two', 0D)"}, {"s": "named_struct('one', 1, 'two', -0D)"}),
    ("b", {"b": "X'00'"}, {"b": "X''"}),
    ("n", {"n": "1.10"}, {"n": "1.11"}),
    ("_exact", {"_exact": "map('n', '1')"}, {"_exact": "map('n', '2')"}),
    ("_exact", {"_exact": "map('n', '1')"}, {}),
]

ALIKE: list[tuple[dict[str, str], dict[str, str]]] = [
    ({"d": "double('NaN')"}, {"d": "double('NaN')"}),
    ({"ad": "array(double('NaN'), -0D, null)"}, {"ad": "array(double('NaN'), -0D, null)"}),
    ({"m": "map('a', '1', 'b', '2')"}, {"m": "map('b', '2', 'a', '1')"}),
    (
        {"s": "named_struct('one', 1, 'two', double('NaN'))"},
        {"s": "named_struct('one', 1, 'two', double('NaN'))"},
    ),
    ({}, {}),
]


def test_every_value_that_differs_is_found_and_named_and_no_other(spark: SparkSession) -> None:
    pairs = [(left, right) for _, left, right in APART] + ALIKE
    found = _compare(
        _rows(spark, [left for left, _ in pairs]), _rows(spark, [right for _, right in pairs]), "id"
    )
    assert (found.source_rows, found.target_rows) == (len(pairs), len(pairs))
    assert (found.missing, found.extra, found.different) == (0, 0, len(APART))
    expected = [name for names, _, _ in APART for name in names.split()]
    assert found.columns == {name: expected.count(name) for name in found.columns}
    assert set(found.columns) == set(expected)
    assert [each.key for each in found.examples] == [{"id": str(at)} for at in range(EXAMPLES)]
    assert found.examples[0] == RowDifference(
        "different", {"id": "0"}, (ColumnDifference("d", "0.0", "-0.0"),)
    )
    assert found.examples[3].columns == (ColumnDifference("x", "v", None), ColumnDifference("y", None, "v"))


def test_equal_tables_of_every_type_are_equal(spark: SparkSession) -> None:
    everything = _rows(spark, [left for _, left, _ in APART] + [left for left, _ in ALIKE])
    found = _compare(everything, everything.repartition(3), "id")
    assert found.equal
    assert found == Comparison(found.table, len(APART) + len(ALIKE), len(APART) + len(ALIKE))


def test_missing_extra_and_doubled_rows_are_distinguished(spark: SparkSession) -> None:
    source = spark.range(1000).selectExpr("id", "id * 2 AS v", "CAST(NULL AS map<string,string>) AS _exact")
    lost = source.where("id <> 7")
    doubled = lost.unionAll(source.where("id = 500"))
    target = doubled.unionAll(source.where("id = 3").selectExpr("id + 5000", "v", "_exact"))
    found = _compare(source, target, "id")
    assert (found.source_rows, found.target_rows) == (1000, 1001)
    assert (found.missing, found.extra, found.different) == (1, 2, 0)
    assert not found.equal
    assert [(each.kind, each.key["id"]) for each in found.examples] == [
        ("extra", "500"),
        ("extra", "5003"),
        ("missing", "7"),
    ]


def test_a_doubled_row_and_a_missing_one_do_not_cancel_out(spark: SparkSession) -> None:
    source = spark.range(200).selectExpr("id", "'same' AS v", "CAST(NULL AS map<string,string>) AS _exact")
    target = source.where("id <> 1").unionAll(source.where("id = 2"))
    found = _compare(source, target, "id")
    assert (found.source_rows, found.target_rows) == (200, 200)
    assert (found.missing, found.extra, found.different) == (1, 1, 0)


def test_tables_that_differ_in_every_row_are_counted_whole(spark: SparkSession) -> None:
    source = spark.range(10_000).selectExpr("id", "id AS v", "CAST(NULL AS map<string,string>) AS _exact")
    found = _compare(source, source.selectExpr("id", "v + 1 AS v", "_exact"), "id")
    assert (found.missing, found.extra, found.different, found.columns) == (0, 0, 10_000, {"v": 10_000})
    assert len(found.examples) == EXAMPLES


def test_without_a_key_rows_are_counted_as_they_are(spark: SparkSession) -> None:
    source = spark.sql(
        "SELECT col1 AS v, CAST(NULL AS map<string,string>) AS _exact FROM VALUES ('a'), ('a'), ('b'), (NULL)"
    )
    target = spark.sql(
        "SELECT col1 AS v, CAST(NULL AS map<string,string>) AS _exact FROM VALUES ('a'), ('b'), ('b'), (NULL)"
    )
    assert _compare(source, source.repartition(2)).equal
    found = _compare(source, target)
    assert (found.missing, found.extra, found.different) == (1, 1, 0)
    assert [(each.kind, each.key["v"]) for each in found.examples] == [("extra", "b"), ("missing", "a")]


def test_a_key_beyond_its_type_is_shown_as_its_exact_text(spark: SparkSession) -> None:
    rows = "SELECT CAST(NULL AS decimal(5,2)) AS id, col1 AS v, map('id', col2) AS _exact FROM VALUES"
    found = _compare(
        spark.sql(f"{rows} (1, 'NaN'), (2, 'Infinity')"),
        spark.sql(f"{rows} (3, 'NaN'), (2, '-Infinity')"),
        "id",
    )
    assert (found.missing, found.extra, found.different, found.columns) == (1, 1, 1, {"v": 1})
    assert [(each.kind, each.key["id"]) for each in found.examples] == [
        ("different", "NaN"),
        ("extra", "-Infinity"),
        ("missing", "Infinity"),
    ]
