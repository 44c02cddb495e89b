"""Schema changes of a target, case by case; `tests/property/test_evolution.py` tests random ones."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from penstock.config.policies import SchemaPolicy, plan_following
from penstock.errors import SchemaChangedError
from penstock.position import Position
from penstock.postgres.catalog import CatalogShape, MissingValue
from penstock.schema import Attributes, Column, TableName, TableSchema
from penstock.sinks.base import Target
from penstock.sinks.evolution import Evolution, ResyncRequired, TypeChange, compare_types, same_views
from penstock.sinks.lineage import Origin
from penstock.sinks.modes import Mode

NAME = TableName("public", "t")
ID, A, B = Column("id", pa.int32(), 23), Column("a", pa.string(), 25), Column("b", pa.int32(), 23)


def schema(
    *columns: tuple[int, Column], key: tuple[str, ...] = ("id",), width: int = 3, heap: str = "h"
) -> TableSchema:
    attributes = Attributes(tuple(number for number, _ in columns), width, heap)
    return TableSchema(7, NAME, tuple(column for _, column in columns), key, attributes)


FIRST = schema((1, ID), (2, A), (3, B))


def target_of(first: TableSchema) -> Target:
    columns = pa.schema([pa.field(column.name, column.arrow_type) for column in first.columns])
    return Target(NAME, 7, first.key, columns, Position.of(1), origin=Origin.of(first))


def follow(
    *versions: TableSchema,
    policy: SchemaPolicy = SchemaPolicy.EVOLVE,
    missing: dict[str, str | None] | None = None,
    target: Target | None = None,
) -> Evolution:
    target = target or target_of(FIRST)
    assert target.origin is not None
    shape = CatalogShape(
        versions[-1], {name: MissingValue(text) for name, text in (missing or {}).items()}, 0, frozenset()
    )
    return plan_following(policy, target, target.origin, versions, shape)


def test_S01_existing_rows_get_the_default_of_the_source() -> None:
    added = schema(
        (1, ID), (2, A), (3, B), (4, Column("c", pa.int32(), 23)), (5, Column("d", pa.string(), 25)), width=5
    )
    found = follow(FIRST, added, missing={"c": "5"})
    assert [(each.name, each.fill.as_py()) for each in found.added] == [("c", 5), ("d", None)]
    assert found.views[FIRST].fills == {"c": pa.scalar(5, pa.int32())}
    assert found.views[added].is_plain
    assert found.columns.names == ["id", "a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("text", "column"),
    [
        (None, Column("c", pa.int32(), 23)),
        ("infinity", Column("c", pa.date32(), 1082)),
        ("NaN", Column("c", pa.decimal128(10, 2), 1700, 655366)),
    ],
)
def test_S01_a_value_that_is_not_known_or_cannot_be_held_is_copied(text: str | None, column: Column) -> None:
    with pytest.raises(ResyncRequired, match="column 'c'"):
        follow(schema((1, ID), (2, A), (3, B), (4, column), width=4), missing={"c": text})


def test_S01_rows_rewritten_since_have_unknown_default_values() -> None:
    with pytest.raises(ResyncRequired, match="column 'c'"):
        follow(schema((1, ID), (2, A), (3, B), (4, Column("c", pa.int32(), 23)), width=4, heap="other"))


def test_S01_a_log_of_changes_keeps_them_unchanged_and_needs_no_default_values() -> None:
    added = schema((1, ID), (2, A), (3, B), (4, Column("c", pa.int32(), 23)), width=4, heap="other")
    found = follow(FIRST, added, missing={"c": None}, target=replace(target_of(FIRST), mode=Mode.APPEND))
    assert [(each.name, each.fill.as_py()) for each in found.added] == [("c", None)]
    assert found.views[FIRST].fills == {}


def test_S02_a_returning_column_has_its_name_and_the_old_one_is_renamed() -> None:
    without = schema((1, ID), (3, B))
    again = schema((1, ID), (3, B), (4, Column("A", pa.date32(), 1082)), width=4)
    found = follow(without, again)
    assert found.renamed == {"a": "a__dropped_1"}
    assert found.dropped == ("a__dropped_1",)
    assert found.columns.names == ["id", "a__dropped_1", "b", "A"]
    twice = target_of(FIRST)
    twice = replace(twice, schema=found.columns, key=found.key, origin=found.origin)
    third = schema((1, ID), (3, B), (5, Column("a", pa.string(), 25)), width=5)
    assert follow(schema((1, ID), (3, B)), third, target=twice).renamed == {"A": "A__dropped_2"}


def test_S03_names_are_swapped_at_once_and_the_key_keeps_its_column() -> None:
    swapped = schema((1, replace(ID, name="a")), (2, replace(A, name="id")), (3, B), key=("a",))
    found = follow(swapped)
    assert found.renamed == {"id": "a", "a": "id"}
    assert found.key == ("a",)
    assert found.columns.field("a").type == pa.int32()


def test_S09_another_key_is_a_new_copy_and_one_that_is_away_for_a_while_is_not() -> None:
    with pytest.raises(ResyncRequired, match="key"):
        follow(replace(FIRST, key=("a",)))
    with pytest.raises(ResyncRequired, match="key"):
        follow(replace(FIRST, key=()))
    more = schema((1, ID), (2, A), (3, B), (4, Column("c", pa.int32(), 23)), width=4)
    assert follow(replace(more, key=()), more).key == ("id",)


def test_S09_rows_without_a_key_cannot_do_without_a_column() -> None:
    whole = replace(FIRST, key=())
    with pytest.raises(ResyncRequired, match="all columns together identify"):
        follow(schema((1, ID), (2, A), key=()), target=target_of(whole))


def test_a_name_that_spark_cannot_tell_apart_is_for_the_copy_to_refuse() -> None:
    for name in ("A", "_exact"):
        with pytest.raises(ResyncRequired, match="name"):
            follow(schema((1, ID), (2, A), (3, replace(B, name=name))))


def test_S13_additive_takes_more_and_nothing_else() -> None:
    more = schema(
        (1, ID),
        (2, A),
        (3, replace(B, arrow_type=pa.int64(), type_oid=20)),
        (4, Column("c", pa.int32(), 23)),
        width=4,
    )
    found = follow(more, policy=SchemaPolicy.ADDITIVE)
    assert (found.widened, [each.name for each in found.added]) == ({"b": pa.int64()}, ["c"])
    for less in (
        schema((1, ID), (2, A)),
        schema((1, ID), (2, A), (3, replace(B, name="x"))),
        replace(FIRST, key=("a",)),
    ):
        with pytest.raises(SchemaChangedError, match="additive"):
            follow(less, policy=SchemaPolicy.ADDITIVE)


def test_S13_ignore_keeps_the_columns_and_knows_which_they_are() -> None:
    changed = schema((1, ID), (3, replace(B, name="a")), (4, Column("b", pa.string(), 25)), width=4)
    found = follow(schema((1, ID), (3, B)), changed, policy=SchemaPolicy.IGNORE)
    assert not found.is_change
    assert found.columns == target_of(FIRST).schema
    assert found.views[changed].names == {"id": "id", "a": "b"}
    assert found.views[changed].leaves_out
    assert same_views(found.columns, found.key, found.origin, [changed]) == {changed: found.views[changed]}
    followed = replace(target_of(FIRST), origin=found.origin)
    with pytest.raises(ResyncRequired, match="not copied until now"):
        follow(
            schema((1, ID), (3, replace(B, name="a2")), (4, Column("b", pa.string(), 25)), width=4),
            target=followed,
        )
    with pytest.raises(SchemaChangedError, match="ignore"):
        follow(
            schema((1, ID), (2, A), (3, replace(B, arrow_type=pa.int64(), type_oid=20))),
            policy=SchemaPolicy.IGNORE,
        )


def test_S13_stop_stops() -> None:
    with pytest.raises(SchemaChangedError, match="stop"):
        follow(schema((1, ID), (2, A)), policy=SchemaPolicy.STOP)


def test_S10_a_default_or_not_null_is_no_change_at_all() -> None:
    origin = Origin.of(FIRST)
    assert origin is not None
    assert same_views(target_of(FIRST).schema, ("id",), origin, [FIRST, replace(FIRST)]) is not None


def test_an_origin_is_read_as_it_was_written() -> None:
    origin = Origin.of(schema((1, ID), (3, replace(A, name='ü "quoted"', type_modifier=54)), width=9))
    assert origin is not None
    assert Origin.parse(str(origin)) == origin
    assert Origin.of(replace(FIRST, attributes=None)) is None


NUMERIC = (1700, 655366, pa.decimal128(10, 2))
BY_POLICY = (1700, -1, pa.decimal128(20, 4))
"""A column without a precision: the target has null for values of more than 20 digits."""


@pytest.mark.parametrize(
    ("before", "after", "is_rewritten", "change"),
    [
        ((21, -1, pa.int16()), Column("a", pa.int64(), 20), True, TypeChange.WIDER),
        ((20, -1, pa.int64()), Column("a", pa.int32(), 23), True, TypeChange.OTHER),
        ((700, -1, pa.float32()), Column("a", pa.float64(), 701), True, TypeChange.WIDER),
        (NUMERIC, Column("a", pa.decimal128(12, 2), 1700, 786438), False, TypeChange.WIDER),
        (NUMERIC, Column("a", pa.decimal128(12, 2), 1700, 786438), True, TypeChange.OTHER),
        (NUMERIC, Column("a", pa.decimal128(12, 3), 1700, 786439), False, TypeChange.OTHER),
        (BY_POLICY, Column("a", pa.decimal128(38, 4), 1700), False, TypeChange.OTHER),
        (BY_POLICY, Column("a", pa.decimal128(38, 4), 1700, 2490376), False, TypeChange.OTHER),
        ((1043, 54, pa.string()), Column("a", pa.string(), 25), False, TypeChange.NONE),
        ((1043, 54, pa.string()), Column("a", pa.string(), 1043, 9), True, TypeChange.OTHER),
        ((650, -1, pa.string()), Column("a", pa.string(), 869), False, TypeChange.OTHER),
        ((23, -1, pa.int32()), Column("a", pa.string(), 25), True, TypeChange.OTHER),
    ],
)
def test_S04_a_type_is_followed_only_where_no_value_can_have_changed(
    before: tuple[int, int, pa.DataType], after: Column, is_rewritten: bool, change: TypeChange
) -> None:
    assert compare_types(before, after, is_rewritten=is_rewritten) is change
