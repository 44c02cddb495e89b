"""Spark filters as Postgres conditions, and how the reader offers to evaluate them."""

from __future__ import annotations

import pickle
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    In,
    IsNotNull,
    IsNull,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from penstock.change import change_schema
from penstock.schema import Column, TableName, TableSchema
from penstock.spark.batch import CurrentRowsReader, translate_filter
from penstock.spark.request import SourceRequest

TABLE = TableSchema(
    1,
    TableName("public", "t"),
    (
        Column("id", pa.int32(), 23),
        Column('odd "name', pa.string(), 25),
        Column("n", pa.decimal128(12, 2), 1700, 786438),
        Column("at", pa.timestamp("us", "UTC"), 1184),
        Column("day", pa.date32(), 1082),
        Column("f", pa.float64(), 701),
        Column("code", pa.string(), 1042),
        Column("spelt", pa.string(), 1700),
    ),
    ("id",),
)
ODD = ('odd "name',)


@pytest.mark.parametrize(
    ("filter", "condition"),
    [
        (EqualTo(("id",), 7), '"id" = 7'),
        (EqualNullSafe(("id",), 7), '"id" = 7'),
        (Not(EqualTo(("id",), 7)), '"id" <> 7'),
        (GreaterThan(("n",), Decimal("1.50")), '"n" > 1.50'),
        (LessThanOrEqual(("day",), date(2024, 2, 29)), "\"day\" <= '2024-02-29'::date"),
        (
            GreaterThan(("at",), datetime(2024, 1, 1, tzinfo=UTC)),
            "\"at\" > '2024-01-01 00:00:00+00:00'::timestamptz",
        ),
        (In(("id",), (1, None, 2)), '"id" IN (1, 2)'),
        (In(("id",), (None,)), "false"),
        (IsNotNull(("f",)), '"f" IS DISTINCT FROM NULL'),
        (EqualTo(ODD, "it's"), '"odd ""name" COLLATE "C" = \'it\'\'s\''),
        (StringStartsWith(ODD, "50%_\\"), '"odd ""name" COLLATE "C" LIKE  E\'50\\\\%\\\\_\\\\\\\\%\''),
        (StringEndsWith(ODD, "x"), '"odd ""name" COLLATE "C" LIKE \'%x\''),
        (StringContains(ODD, "x"), '"odd ""name" COLLATE "C" LIKE \'%x%\''),
    ],
)
def test_filter_becomes_a_condition(filter: Filter, condition: str) -> None:
    assert translate_filter(filter, TABLE) == condition


@pytest.mark.parametrize(
    "filter",
    [
        IsNull(("n",)),  # a value that its type cannot hold is null in Spark only
        Not(IsNull(("n",))),
        EqualTo(("f",), 1.0),
        EqualTo(("code",), "ab"),  # trailing blanks are significant in Spark only
        EqualTo(("spelt",), "1.0"),  # a number in Postgres, a text in Spark
        In(("spelt",), ("1.0", "2")),
        Not(EqualTo(("spelt",), "1.0")),
        GreaterThan(("spelt",), "9"),
        EqualTo(ODD, "a\0b"),
        In(ODD, ("a", "a\0b")),
        Not(EqualTo(ODD, "a\0b")),
        StringContains(ODD, "\0"),
        EqualTo(("nothing",), 1),
        EqualTo(("id", "inner"), 1),
        EqualTo(("id",), None),
        EqualNullSafe(("id",), None),
        StringContains(("id",), "1"),
        Not(In(("id",), (1, 2))),
    ],
)
def test_filter_that_would_mean_something_else_there_stays_with_spark(filter: Filter) -> None:
    assert translate_filter(filter, TABLE) is None


def test_reader_takes_filters_without_being_refused_where_spark_offers_none() -> None:
    request = SourceRequest.parse({"dsn": "postgresql://cdc@db.example/shop", "table": "public.t"})
    reader = CurrentRowsReader(request, TABLE, change_schema(TABLE))
    # Spark checks this method before it reads. If it were overridden, Spark would refuse to read, unless
    # pushdown is enabled.
    assert getattr(reader.pushFilters, "__func__", None) is DataSourceReader.pushFilters
    filters = [EqualTo(("id",), 7), EqualTo(("f",), 1.0)]
    assert list(reader.pushFilters(filters)) == filters
    assert pickle.loads(pickle.dumps(reader)).conditions == ['"id" = 7']
