"""Results of single transforms, and the values they refuse."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from penstock.change import EXACT, EXACT_TYPE, METADATA_FIELDS
from penstock.errors import ConfigError, TransformError
from penstock.postgres.types.column import TypePolicy
from penstock.postgres.types.registry import TypeResolver
from penstock.schema import Column, TableName, TableSchema
from penstock.secret import Secret
from penstock.transforms.apply import REASON, transform_changes, transform_rows
from penstock.transforms.casts import cast_values, parse_cast, plain_text
from penstock.transforms.columns import Mask, hash_texts, hash_values
from penstock.transforms.condition import NotSimple, Values
from penstock.transforms.condition_parser import parse_condition
from penstock.transforms.transform import Transform
from tests.support.transforms.answers import ANSWERS, COLUMNS

KEY = Secret("a key for tests")
TYPES = {name: values.type for name, values in COLUMNS.items()}


@pytest.mark.parametrize("text", ANSWERS)
def test_a_condition_has_the_same_meaning_as_in_spark(text: str) -> None:
    found = parse_condition(text, TYPES).judge(Values(COLUMNS, {}, 5))
    assert (
        "".join("t" if yes else "f" if no else "n" for yes, no in zip(found.yes, found.no, strict=True))
        == ANSWERS[text]
    )


@pytest.mark.parametrize(
    "text",
    ["upper(s) = 'EU'", "n + 1 = 2", "s = 'it''s'", r"s = 'a\nb'", "n = '5'", "n = (SELECT 1)",
     "CASE WHEN b THEN b END", "s = 5", "n", "n = 1 n", "s RLIKE 'a'", "list = list", "CAST(s AS bigint) = 1",
     "n = NULL", "day = '31.12.2024'", "d > f",
     "s LIKE 'a' ESCAPE 'b'", "(n) = 1"],
)  # fmt: skip
def test_properties_known_to_spark_only_are_not_guessed(text: str) -> None:
    with pytest.raises(NotSimple):
        parse_condition(text, TYPES)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(ConfigError, match="no column 'region'"):
        parse_condition("region = 'EU'", TYPES)


def test_a_missing_value_matters_only_where_the_answer_depends_on_it() -> None:
    missing = {"s": np.array([True, True, True, False, True])}
    for text, expected in {
        "n = 5 AND s = 'x'": "f??f?",
        "n = 5 OR s = 'x'": "?t?ft",
        "s IS NULL": "???f?",
        "NOT (s = 'x' AND n = 1)": "?t?tt",
    }.items():
        found = parse_condition(text, TYPES).judge(Values(COLUMNS, missing, 5))
        answers = [
            "?" if lost else "t" if yes else "f" for yes, lost in zip(found.yes, found.missing, strict=True)
        ]
        assert "".join(answers) == expected, text


def test_K13_a_hash_is_keyed_and_the_same_for_equal_values_of_every_type() -> None:
    one, other = hash_values(pa.array(["a", None, "a"]), KEY), hash_values(pa.array(["a"]), Secret("another"))
    assert one[0] == one[2]
    assert one[1].as_py() is None
    assert one[0] != other[0]
    assert len(one[0].as_py()) == 64
    five = hash_values(pa.array(["5"]), KEY)[0]
    numbers = [pa.array([5], pa.int16()), pa.array([5]), pa.array([Decimal("5.000")]), pa.array([5.0])]
    assert all(hash_values(values, KEY)[0] == five for values in numbers)
    assert hash_texts(pa.array(["5.00", None]), KEY, pa.decimal128(38, 18)).to_pylist() == [
        five.as_py(),
        None,
    ]


def test_K13_a_number_is_hashed_in_time_that_grows_with_its_length() -> None:
    """A number with zeros in the middle takes no longer than another of the same length, by far."""
    plain, zeros = (pa.array([f"1.{digit * 60_000}1"]) for digit in "20")

    def seconds(texts: pa.Array) -> float:
        started = time.process_time()
        hash_texts(texts, KEY, pa.decimal128(38, 18))
        return time.process_time() - started

    assert min(seconds(zeros) for _ in range(5)) < 50 * max(min(seconds(plain) for _ in range(5)), 1e-4)
    same = [
        hash_texts(pa.array([text]), KEY, pa.decimal128(38, 18))[0] for text in ("-10.0", "-10.00", "-10")
    ]
    assert len(set(same)) == 1
    assert hash_texts(pa.array(["-0.0", "0.00", "1.010", "100.0"]), KEY, pa.decimal128(38, 18)).equals(
        hash_values(pa.array(["0", "0", "1.01", "100"]), KEY)
    )


def test_K13_arrays_are_hashed_and_masked_element_by_element() -> None:
    values = pa.array([["ab", None], [], None, ["ab"]]).slice(0, 4)
    hashed = hash_values(values, KEY).to_pylist()
    assert hashed[0][0] == hashed[3][0] == hash_values(pa.array(["ab"]), KEY)[0].as_py()
    assert (hashed[0][1], hashed[1], hashed[2]) == (None, [], None)
    assert Mask(1)(values).to_pylist() == [["a***", None], [], None, ["a***"]]


def test_a_mask_tells_nothing_of_short_texts_nor_of_lengths() -> None:
    values = pa.array(["4111111111111111", "1234", "12345", None, "äöüßx", ""])
    assert Mask(0, 4)(values).to_pylist() == ["***1111", "***", "***2345", None, "***öüßx", "***"]
    assert Mask()(values).to_pylist() == ["***", "***", "***", None, "***", "***"]


def test_a_cast_never_rounds_or_cuts() -> None:
    def held(values: pa.Array, name: str) -> list[object]:
        found, failed = cast_values(values, parse_cast(name))
        return ["failed" if lost else value for value, lost in zip(found.to_pylist(), failed, strict=True)]

    assert held(pa.array(["1", " 2 ", "x", None, "1.5"]), "int") == [1, 2, "failed", None, "failed"]
    assert held(pa.array(["1.50", "1.555", "NaN", "1e2"]), "decimal(5,2)") == [
        Decimal("1.50"),
        "failed",
        "failed",
        Decimal("100.00"),
    ]
    assert held(pa.array([Decimal("1.50"), Decimal("2.00")]), "int") == ["failed", 2]
    assert held(pa.array([2**40, 5]), "int") == ["failed", 5]
    assert held(pa.array(["yes", "F", "2"]), "boolean") == [True, False, "failed"]
    assert held(pa.array([Decimal("0.0000000001")], pa.decimal128(38, 18)), "string") == [
        "0.000000000100000000"
    ]
    assert held(pa.array(["2024-01-02 03:04:05", "2024-01-02T03:04:05+02:00"]), "timestamp") == [
        datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC),
        datetime(2024, 1, 2, 1, 4, 5, tzinfo=UTC),
    ]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("1e999999", "decimal(38,1)"),
        ("-1e-999999", "decimal(38,1)"),
        ("sNaN", "decimal(38,1)"),
        ("1234567890123456789012345678.5", "decimal(38,0)"),
        ("9" * 38, "decimal(38,1)"),
        ("1e999", "double"),
        ("1e-999", "double"),
        ("0000-01-01", "date"),
        ("9999-12-31 23:59:59-12", "timestamp"),
        ("0001-01-01 00:00:00+14", "timestamp"),
        ("0000-01-01 00:00:00", "timestamp_ntz"),
    ],
)
def test_a_text_beyond_its_cast_is_rejected_and_never_raises(text: str, name: str) -> None:
    found, failed = cast_values(pa.array([text, None]), parse_cast(name))
    assert found.to_pylist() == [None, None]
    assert failed.tolist() == [True, False]


@pytest.mark.parametrize(
    "text", ["1" * 37, "-" + "9" * 37 + ".9", "0e999999", "1.5000000000000000000000000000000000000000"]
)
def test_a_decimal_that_fits_is_cast_exactly_whatever_its_digits(text: str) -> None:
    found, failed = cast_values(pa.array([text]), parse_cast("decimal(38,1)"))
    assert found.to_pylist() == [Decimal(text)]
    assert not failed.any()


def test_a_year_that_python_does_not_know_has_a_text() -> None:
    late = pa.array([253_402_300_800_500_000], pa.int64())
    assert [plain_text(late.cast(pa.timestamp("us", zone))).to_pylist() for zone in (None, "UTC")] == [
        ["10000-01-01 00:00:00.5"]
    ] * 2


TABLE = TableSchema(
    16400,
    TableName("public", "people"),
    (
        Column("id", pa.int64(), 20),
        Column("email", pa.string(), 25),
        Column("pay", pa.decimal128(38, 18), 1700),
        Column("tags", pa.list_(pa.string()), 1009),
    ),
    ("id",),
)
ROWS = pa.table(
    {
        "id": [1, 2, 3],
        "email": ["a@x", "bb@y", None],
        "pay": pa.array([Decimal(5), None, None], pa.decimal128(38, 18)),
        "tags": pa.array([["q"], None, []], pa.list_(pa.string())),
        EXACT: pa.array([None, [("pay", "1e90")], None], EXACT_TYPE),
    }
)


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (Transform(drop=("mail",)), "no column 'mail'"),
        (Transform(hash=("Email",), key=KEY), "no column 'Email'"),
        (Transform(drop=("id",)), "part of the key"),
        (Transform(mask={"id": Mask()}), "only texts can be masked"),
        (Transform(cast={"id": "string"}, mask={"id": Mask(1)}), "part of the key"),
        (Transform(cast={"id": "int"}), "part of the key"),
        (Transform(rename={"email": "ID"}), "would both be called"),
        (Transform(rename={"email": "_exact"}), "a name that every change has"),
        (Transform(cast={"tags": "string"}), "cannot be cast"),
        (Transform(where="mail = 'X'"), "no column 'mail'"),
        (Transform(drop=("id", "email", "pay", "tags"), needs_key=False), "no column is left"),
    ],
    ids=str,
)
def test_a_transform_that_does_not_fit_is_refused_with_the_reason(transform: Transform, reason: str) -> None:
    with pytest.raises(TransformError, match=reason):
        transform.schema(TABLE)


def test_hashed_and_masked_values_are_nowhere_in_the_clear() -> None:
    fitted = Transform(hash=("pay",), mask={"email": Mask(1)}, key=KEY).fit(TABLE)
    kept = transform_rows(fitted, ROWS).kept
    assert kept.column("email").to_pylist() == ["a***", "b***", None]
    assert kept.column("pay").to_pylist() == [
        hash_values(pa.array(["5"]), KEY)[0].as_py(),
        hash_values(pa.array(["1e90"]), KEY)[0].as_py(),
        None,
    ]
    assert kept.column(EXACT).null_count == 3
    assert KEY.reveal() not in repr(fitted)


def test_a_filter_over_a_value_beyond_its_type_refuses_the_row() -> None:
    outcome = transform_rows(Transform(where="pay > 3").fit(TABLE), ROWS)
    assert outcome.kept.column("id").to_pylist() == [1]
    assert outcome.refused.column("id").to_pylist() == [2]
    assert "REPLICA IDENTITY FULL" in outcome.refused.column(REASON)[0].as_py()


def test_a_row_that_cannot_be_cast_is_rejected_and_its_value_not_shown() -> None:
    outcome = transform_rows(Transform(cast={"pay": "int"}, where="id <> 1").fit(TABLE), ROWS)
    assert outcome.kept.column("id").to_pylist() == [3]
    assert outcome.reasons == {"column 'pay' holds a value that cannot be cast to int": 1}


def test_K15_a_delete_passes_whatever_the_old_row_held() -> None:
    """Its old values are only for readers; they never cause a rejection."""
    kinds = ["delete", "delete", "update_preimage"]
    columns = {name: ROWS.column(name) for name in TABLE.column_names}
    known = {
        "_change_type": kinds,
        "_ordinal": [0, 1, 2],
        "_commit_version": [5, 5, 5],
        "_xid": [1, 1, 1],
        EXACT: ROWS.column(EXACT),
    }
    metadata = {field.name: known.get(field.name, pa.nulls(3, field.type)) for field in METADATA_FIELDS}
    changes = pa.table({**columns, **metadata}).cast(
        pa.schema([*((name, columns[name].type) for name in columns), *METADATA_FIELDS])
    )
    outcome = transform_changes(Transform(cast={"pay": "int"}).fit(TABLE), changes)
    assert outcome.refused.num_rows == 0
    assert outcome.kept.select(["id", "pay", "_change_type"]).to_pylist() == [
        {"id": 1, "pay": 5, "_change_type": "delete"},
        {"id": 2, "pay": None, "_change_type": "delete"},
        {"id": 3, "pay": None, "_change_type": "update_preimage"},
    ]


def test_in_a_log_of_changes_the_key_may_go() -> None:
    assert Transform(drop=("id",), needs_key=False).schema(TABLE).key == ()
    assert Transform(hash=("id",), rename={"id": "who"}, key=KEY).schema(TABLE).key == ("who",)


def test_the_sources_own_text_is_transformed_as_its_values_would_be() -> None:
    """For a Postgres target all values are texts."""
    resolver = TypeResolver(TypePolicy(form="text"))
    columns = [("id", 20), ("ok", 16), ("pay", 1700), ("day", 1082), ("tags", 1009)]
    table = TableSchema(
        1, TableName("a", "b"), tuple(resolver.column(name, oid, -1) for name, oid in columns), ("id",)
    )
    rows = pa.table(
        {
            "id": ["7", "8", "9"],
            "ok": ["t", "f", None],
            "pay": ["1.50", "NaN", "20"],
            "day": ["2024-01-01", "infinity", None],
            "tags": ['{a,"b c"}', None, "{}"],
            EXACT: pa.nulls(3, EXACT_TYPE),
        }
    )
    fitted = Transform(
        hash=("pay", "tags"),
        cast={"ok": "string", "id": "string"},
        where="id >= 7 AND ok IS NOT NULL",
        key=KEY,
    ).fit(table)
    kept = transform_rows(fitted, rows).kept.to_pylist()
    assert [row["ok"] for row in kept] == ["true", "false"]
    assert [row["pay"] for row in kept] == [
        hash_values(pa.array([text]), KEY)[0].as_py() for text in ("1.5", "NaN")
    ]
    first, second = hash_values(pa.array(["a", "b c"]), KEY).to_pylist()
    assert kept[0]["tags"] == f'{{"{first}","{second}"}}'
    assert [column.type_oid for column in fitted.schema.columns] == [25, 25, 25, 1082, 1009]


def test_a_transform_can_be_pickled_and_has_a_fingerprint() -> None:
    one = Transform(hash=("email",), where="id > 5", key=KEY)
    fitted = pickle.loads(pickle.dumps(one.fit(TABLE)))
    assert fitted.schema == one.schema(TABLE)
    others = [
        Transform(hash=("email",), key=KEY),
        Transform(hash=("email",), where="id > 5", key=Secret("x")),
        Transform(),
    ]
    assert len({each.fingerprint for each in [one, *others]}) == 4


def test_a_column_of_the_source_may_have_the_name_of_one_that_rejected_rows_get() -> None:
    table = replace(TABLE, columns=(*TABLE.columns, Column("_reason", pa.string(), 25)))
    rows = ROWS.append_column("_reason", pa.array([f"own {number}" for number in range(ROWS.num_rows)]))
    outcome = transform_rows(
        Transform(where="pay > 3").fit(table),
        rows.select([*(column.name for column in table.columns), EXACT]),
    )
    assert outcome.refused.column("_reason").to_pylist() == ["own 1"]
    assert sum(outcome.reasons.values()) == 1
