"""SQL transforms over rows and changes: missing values, errors and keys.

Functions take the place of Spark.
"""

from __future__ import annotations

import pickle
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.change import CHANGE_TYPE, EXACT, EXACT_TYPE, METADATA_FIELDS, UNCHANGED
from penstock.config.tables import TableRule, build_transform
from penstock.errors import ConfigError, RowRefusedError, SinkError, TransformError
from penstock.pipeline.snapshots.executors import ChunkAsker
from penstock.pipeline.snapshots.task import write_file
from penstock.pipeline.transform_sink import TransformingSink
from penstock.position import Position
from penstock.postgres.types.column import TypePolicy
from penstock.postgres.types.registry import TypeResolver
from penstock.schema import Column, TableName, TableSchema
from penstock.sinks.base import TableChanges, Target
from penstock.sinks.lineage import Origin
from penstock.spark.query import Analysis, Selected
from penstock.transforms.apply import REASON, transform_changes, transform_keys, transform_rows
from penstock.transforms.computed import Computed, read_kind
from penstock.transforms.spark_exchange import read_answers, write_questions
from penstock.transforms.staging import read_source
from penstock.transforms.transform import Transform
from penstock.transforms.values import target_lists
from tests.support.plain_queries import Made, PlainQuery
from tests.support.sinks.history import PLAIN
from tests.support.snapshot.local import LocalExecutors
from tests.support.transforms.staging import RecordingSink

TABLE = TableSchema(
    16400,
    TableName("public", "people"),
    (
        Column("id", pa.int64(), 20),
        Column("name", pa.string(), 25),
        Column("text", pa.string(), 25),
        Column("pay", pa.decimal128(38, 18), 1700),
    ),
    ("id",),
)
SIZE = Made("integer", ("text",), lambda row: None if row["text"] is None else len(row["text"]))
BOTH = Made("string", ("name", "text"), lambda row: f"{row['name']}/{row['text']}")
NUMBER = Made("integer", ("name",), lambda row: None if row["name"] is None else int(row["name"]))
NAMED = Made("boolean", ("name",), lambda row: len(row["name"]) > 0)
EVERY = PlainQuery({"who": "id", "name": "name", "size": SIZE, "both": BOTH})


def rows_of(
    *rows: tuple[int, str | None, str | None, Decimal | None],
    exact: dict[int, list[tuple[str, str]]] | None = None,
) -> pa.Table:
    columns = [
        pa.array(values, column.arrow_type)
        for values, column in zip(zip(*rows, strict=True), TABLE.columns, strict=True)
    ]
    texts = pa.array([(exact or {}).get(at) for at in range(len(rows))], EXACT_TYPE)
    return pa.table([*columns, texts], names=[*TABLE.column_names, EXACT])


def changes_of(
    *given: tuple[str, int, str | None, str | None, list[str] | None], table: TableSchema = TABLE
) -> pa.Table:
    """Kind, id, name, text, and unchanged columns."""
    count = len(given)
    kinds, ids, names, texts, unchanged = (list(each) for each in zip(*given, strict=True))
    own = {"id": ids, "name": names, "text": texts, "pay": [None] * count}
    metadata = [
        kinds,
        list(range(100, 100 + count)),
        [None] * count,
        [0] * count,
        [1] * count,
        unchanged,
        [None] * count,
    ]
    columns = [pa.array(own[column.name], column.arrow_type) for column in table.columns]
    columns += [pa.array(values, field.type) for values, field in zip(metadata, METADATA_FIELDS, strict=True)]
    fields = [pa.field(column.name, column.arrow_type) for column in table.columns]
    return pa.table(
        columns, schema=pa.schema([*fields, *(pa.field(field.name, field.type) for field in METADATA_FIELDS)])
    )


def test_columns_of_the_sink_come_from_the_analysed_query() -> None:
    fitted = EVERY.transform().fit(TABLE)
    assert [(column.name, column.arrow_type, column.type_oid) for column in fitted.schema.columns] == [
        ("who", pa.int64(), 20),
        ("name", pa.string(), 25),
        ("size", pa.int32(), 23),
        ("both", pa.string(), 25),
    ]
    assert fitted.schema.key == ("who",)
    assert pickle.loads(pickle.dumps(fitted)).schema == fitted.schema
    assert not fitted.is_filter


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (PlainQuery({"name": "name"}), "'id' is part of the key, and has to be selected as it is"),
        (PlainQuery({"id": Made("long", ("id",), lambda row: row["id"])}), "'id' is part of the key"),
        (PlainQuery({"id": "id", "upper(name)": Made("string", ("name",), str)}), "AS …"),
        (PlainQuery({"id": "id", "x": Made("void", (), lambda _: None)}), "gives null a type"),
        (PlainQuery({"id": "id", "x": Made("variant", ("name",), str)}), "targets do not support"),
        (PlainQuery({"id": "id", "ID": "name"}), "would both be called"),
        (PlainQuery({"id": "id", "_exact": "name"}), "a name that every change has"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_query_that_no_target_can_hold_is_refused_with_the_reason(query: PlainQuery, reason: str) -> None:
    with pytest.raises(TransformError, match=reason):
        query.transform().fit(TABLE)


def test_error_of_spark_about_a_query_is_repeated() -> None:
    def refuse(text: str, columns: object) -> Analysis:
        raise ConfigError(f"no {text}", hint="")

    with pytest.raises(TransformError, match="sql: no SELECT"):
        Transform(sql="SELECT", analyse=refuse).fit(TABLE)
    with pytest.raises(TransformError, match="where: no SELECT"):
        Transform(where="f(id)", analyse=refuse).fit(TABLE)


def test_spark_is_not_asked_about_simple_queries() -> None:
    def never(text: str, columns: object) -> Analysis:
        raise AssertionError("asked")

    assert Transform(where="id > 5", analyse=never).fit(TABLE).query is None
    assert not Transform(where="id > 5").needs_spark(TABLE)
    assert Transform(where="id + 1 > 5").needs_spark(TABLE)
    assert Transform(sql="SELECT * FROM source").needs_spark(TABLE)


def test_in_a_log_of_changes_a_query_may_leave_the_key_out() -> None:
    assert PlainQuery({"name": "name"}).transform(needs_key=False).schema(TABLE).key == ()


def test_a_query_of_plain_columns_alone_needs_no_spark_to_run() -> None:
    fitted = PlainQuery({"name": "name", "key": "id"}).transform().fit(TABLE)
    assert fitted.query is None
    kept = transform_rows(fitted, rows_of((1, "a", "b", None))).kept
    assert kept.drop_columns([EXACT]).to_pylist() == [{"name": "a", "key": 1}]


def test_a_column_that_is_selected_twice_exists_twice_and_its_first_name_is_the_key() -> None:
    query = PlainQuery({"id": "id", "again": "id", "text": "text", "copy": "text"})
    fitted = query.transform().fit(TABLE)
    assert fitted.key == ("id",)
    made = transform_changes(
        fitted, changes_of(("update_postimage", 1, "a", None, ["text"]))
    ).kept.to_pylist()
    assert (made[0]["id"], made[0]["again"], made[0][UNCHANGED]) == (1, 1, ["text", "copy"])
    assert transform_keys(fitted, rows_of((5, None, None, None)).select(["id", EXACT])).column_names == [
        "id",
        EXACT,
    ]


def test_an_error_rejects_its_row_only_and_its_value_is_not_shown() -> None:
    query = PlainQuery({"id": "id", "number": NUMBER})
    fitted = query.transform().fit(TABLE)
    rows = rows_of((1, "12", "x", None), (2, "twelve", "x", None), (3, None, "x", None))
    outcome = transform_rows(fitted, rows, query.ask(fitted, rows))
    assert outcome.kept.column("number").to_pylist() == [12, None]
    (refused,) = outcome.refused.to_pylist()
    assert refused["id"] == 2
    assert "'number'" in refused[REASON]
    assert "twelve" not in refused[REASON]
    changed = changes_of(("insert", 1, "12", None, None), ("insert", 2, "twelve", None, None))
    outcome = transform_changes(fitted, changed, query.ask(fitted, changed))
    assert outcome.kept.column("number").to_pylist() == [12]
    assert outcome.refused.column("id").to_pylist() == [2]


def test_an_error_in_a_row_that_the_filter_leaves_out_is_ignored() -> None:
    query = PlainQuery({"id": "id", "number": NUMBER}, Made("boolean", ("id",), lambda row: row["id"] > 1))
    fitted = query.transform().fit(TABLE)
    rows = rows_of((1, "one", "x", None), (2, "2", "x", None))
    outcome = transform_rows(fitted, rows, query.ask(fitted, rows))
    assert outcome.kept.column("number").to_pylist() == [2]
    assert not outcome.refused.num_rows


def test_a_result_of_one_column_is_unchanged_where_that_is_and_one_of_several_is_refused() -> None:
    fitted = EVERY.transform().fit(TABLE)
    only = PlainQuery({"id": "id", "size": SIZE})
    changed = changes_of(("update_postimage", 1, "a", None, ["text"]))
    outcome = transform_changes(
        only.transform().fit(TABLE), changed, only.ask(only.transform().fit(TABLE), changed)
    )
    assert outcome.kept.column(UNCHANGED).to_pylist() == [["size"]]
    outcome = transform_changes(fitted, changed, EVERY.ask(fitted, changed))
    (reason,) = outcome.reasons
    assert reason == (
        "column 'both' depends on a value that the change lacks; with REPLICA IDENTITY FULL every "
        "change has all values"
    )


def test_a_value_that_an_earlier_change_of_the_epoch_had_is_not_missing() -> None:
    fitted = EVERY.transform().fit(TABLE)
    changed = changes_of(("insert", 1, "a", "long", None), ("update_postimage", 1, "b", None, ["text"]))
    outcome = transform_changes(fitted, changed, EVERY.ask(fitted, changed))
    assert not outcome.refused.num_rows
    assert outcome.kept.column("both").to_pylist() == ["a/long", "b/long"]
    assert outcome.kept.column("size").to_pylist() == [4, 4]


def test_an_error_over_an_unchanged_toast_value_is_ignored() -> None:
    """Spark sees null there."""
    query = PlainQuery({"id": "id", "size": Made("integer", ("text",), lambda row: len(row["text"]))})
    fitted = query.transform().fit(TABLE)
    changed = changes_of(
        ("update_postimage", 1, "a", None, ["text"]), ("update_postimage", 2, "a", None, None)
    )
    outcome = transform_changes(fitted, changed, query.ask(fitted, changed))
    assert outcome.kept.column("id").to_pylist() == [1]
    assert outcome.refused.column("id").to_pylist() == [2]


def test_a_value_beyond_its_type_cannot_be_worked_with() -> None:
    query = PlainQuery(
        {
            "id": "id",
            "pay": "pay",
            "twice": Made("double", ("pay",), lambda row: row["pay"] and float(row["pay"]) * 2),
        }
    )
    fitted = query.transform().fit(TABLE)
    rows = rows_of((1, None, None, Decimal(2)), (2, None, None, None), exact={1: [("pay", "NaN")]})
    outcome = transform_rows(fitted, rows, query.ask(fitted, rows))
    assert outcome.kept.column("twice").to_pylist() == [4.0]
    assert outcome.reasons == {"column 'twice' depends on a value outside its type": 1}


def test_deletes_and_truncates_have_no_row_to_work_with() -> None:
    size, word = (
        Made("integer", ("text",), lambda row: len(row["text"])),
        Made("string", ("text",), lambda row: str(row["text"])),
    )
    query = PlainQuery({"id": "id", "size": size, "word": word}, NAMED)
    fitted = query.transform().fit(TABLE)
    changed = changes_of(("delete", 1, None, None, None), ("truncate", 0, None, None, None))
    outcome = transform_changes(fitted, changed, query.ask(fitted, changed))
    assert not outcome.refused.num_rows
    assert outcome.kept.column(CHANGE_TYPE).to_pylist() == ["delete", "truncate"]
    assert outcome.kept.column("size").to_pylist() == [None, None]
    assert outcome.kept.column("word").to_pylist() == [None, None], (
        "the way Spark treats nulls is irrelevant there"
    )


def test_a_row_that_leaves_the_filter_is_a_delete_and_an_undecidable_one_is_refused() -> None:
    where = Made("boolean", ("name",), lambda row: None if row["name"] is None else int(row["name"]) > 5)
    query = PlainQuery(where=where)
    fitted = query.condition().fit(TABLE)
    assert fitted.is_filter
    changed = changes_of(
        ("insert", 1, "7", "t", None),
        ("insert", 2, "3", "t", None),
        ("update_postimage", 3, "3", "t", None),
        ("update_postimage", 4, None, "t", None),
        ("update_postimage", 5, "x", "t", None),
        ("update_postimage", 6, None, "t", ["name"]),
        ("delete", 7, None, None, None),
    )
    outcome = transform_changes(fitted, changed, query.ask(fitted, changed))
    kept = [(row["id"], row[CHANGE_TYPE]) for row in outcome.kept.to_pylist()]
    assert kept == [(1, "insert"), (3, "delete"), (4, "delete"), (7, "delete")]
    reasons = dict(
        zip(outcome.refused.column("id").to_pylist(), outcome.refused.column(REASON).to_pylist(), strict=True)
    )
    assert "cannot be evaluated" in reasons[5]
    assert "REPLICA IDENTITY FULL" in reasons[6]
    assert reasons.keys() == {5, 6}


def test_on_the_way_to_another_postgres_spark_sees_types_and_the_target_text() -> None:
    resolver = TypeResolver(TypePolicy(form="text"))
    columns = [("id", 20), ("pay", 1700), ("day", 1082), ("ok", 16)]
    table = TableSchema(
        1, TableName("a", "b"), tuple(resolver.column(name, oid, -1) for name, oid in columns), ("id",)
    )
    rows = pa.table(
        {"id": ["7"], "pay": ["1.50"], "day": ["2024-01-01"], "ok": ["t"], EXACT: pa.nulls(1, EXACT_TYPE)}
    )
    query = PlainQuery(
        {
            "id": "id",
            "more": Made("decimal(38,2)", ("pay",), lambda row: (row["pay"] + 1).quantize(Decimal("0.01"))),
            "year": Made("integer", ("day",), lambda row: row["day"].year),
            "no": Made("boolean", ("ok",), lambda row: not row["ok"]),
            "raw": Made("binary", (), lambda _: b"\x01\xff"),
        }
    )
    fitted = query.transform().fit(table)
    (made,) = transform_rows(fitted, rows, query.ask(fitted, rows)).kept.drop_columns([EXACT]).to_pylist()
    assert made == {"id": "7", "more": "2.50", "year": "2024", "no": "false", "raw": "\\x01ff"}
    assert [column.type_oid for column in fitted.schema.columns] == [20, 1700, 23, 16, 17]


def test_lists_are_written_as_postgres_reads_them() -> None:
    kind = read_kind('{"type":"array","elementType":"integer","containsNull":true}')
    computed = Computed("a", 0, (), kind, is_text_form=True)
    assert computed.written(pa.array([[1, None], None, []], kind)).to_pylist() == ['{"1",NULL}', None, "{}"]
    assert computed.column.type_oid == 1007
    assert read_kind('{"type":"struct","fields":[]}') is None
    assert read_kind('"interval day to second"') is None


def test_only_columns_that_the_query_needs_are_sent_to_spark(tmp_path: Path) -> None:
    query = PlainQuery({"id": "id", "size": SIZE}, Made("boolean", ("pay",), lambda _: True))
    fitted = query.transform().fit(TABLE)
    path = write_questions(fitted, rows_of((1, "a", "b", None)), str(tmp_path), 3)
    assert path is not None
    assert pq.read_schema(path).names == ["text", "pay", "_row"]
    assert write_questions(fitted, rows_of((1, "a", "b", None)).slice(1), str(tmp_path), 3) is None


def test_answers_that_are_not_all_there_are_an_error(tmp_path: Path) -> None:
    query = PlainQuery({"id": "id", "size": SIZE})
    fitted = query.transform().fit(TABLE)
    rows = rows_of((1, "a", "b", None), (2, "a", "b", None))
    path = write_questions(fitted, rows, str(tmp_path), 3)
    assert path is not None
    query.answer(fitted, [path], str(tmp_path / "answers"))
    assert read_answers(fitted, str(tmp_path / "answers"), 3, 2).table.num_rows == 2
    for group, count in ((3, 3), (2, 2)):
        with pytest.raises(SinkError, match="Spark evaluated"):
            read_answers(fitted, str(tmp_path / "answers"), group, count)


def test_unchanged_columns_are_named_as_the_target_has_them() -> None:
    column = pa.chunked_array([pa.array([["a", "b"], None, ["c"], ["b"], []], pa.list_(pa.string()))])
    found = target_lists(column, {"a": ("x",), "b": ("y", "z"), "d": ("w",)})
    assert found.to_pylist() == [["x", "y", "z"], None, None, ["y", "z"], None]
    assert target_lists(column, {}).to_pylist() == [None] * 5


def test_a_sink_receives_the_changes_transformed_by_spark(changes: TableChanges, tmp_path: Path) -> None:
    query = PlainQuery(
        {"id": "id", "note": "note", "odd": Made("boolean", ("id",), lambda row: row["id"] % 2 == 1)},
        Made("boolean", ("id",), lambda row: row["id"] is not None and row["id"] % 3 > 0),
    )
    transform = query.transform()
    sink = RecordingSink(tmp_path / "lake")
    target = Target(
        PLAIN.name,
        PLAIN.oid,
        PLAIN.key,
        pa.schema([]),
        Position.of(1),
        origin=Origin({}, 1, "", transform.fingerprint),
    )
    seen = TransformingSink(sink, lambda _: transform, LocalExecutors(), tmp_path / "staged", query)
    seen.apply(target, changes, Position.of(10**9))
    fitted, source = transform.fit(PLAIN), read_source(changes.slices, PLAIN)
    expected = transform_changes(fitted, source, query.ask(fitted, source))
    assert expected.refused.num_rows == 0
    assert sink.taken.equals(expected.kept)
    assert not list((tmp_path / "staged").iterdir()), "nothing is left when it is applied"


def test_a_chunk_is_read_once_and_written_with_the_rows_transformed_by_spark(tmp_path: Path) -> None:
    query = PlainQuery({"id": "id", "size": SIZE})
    fitted = query.transform().fit(TABLE)
    batches = [rows_of((at, "a", "x" * at, None)).to_batches()[0] for at in range(5)]
    asker = ChunkAsker(fitted, write_file, query, tmp_path / "asked")
    found = asker.copy(
        LocalExecutors(),
        lambda: iter(batches),
        lambda rows, _: [row for batch in rows for row in batch.to_pylist()],
    )
    assert [(row["id"], row["size"]) for row in found] == [(at, at) for at in range(5)]
    assert asker.copy(LocalExecutors(), lambda: iter(()), lambda rows, _: list(rows)) == []
    failing = PlainQuery({"id": "id", "number": NUMBER})
    asker = ChunkAsker(failing.transform().fit(TABLE), write_file, failing, tmp_path / "asked")
    with pytest.raises(RowRefusedError, match="'number'"):
        asker.copy(LocalExecutors(), lambda: iter(batches), lambda rows, _: list(rows))
    assert not list((tmp_path / "asked").iterdir())


def test_a_rule_says_either_a_query_or_columns_and_a_filter() -> None:
    rule = TableRule.model_validate({"table": "a.b", "sql": "SELECT * FROM source"})
    assert rule.transforms
    assert build_transform(rule, None, needs_key=True) == Transform(sql="SELECT * FROM source")
    with pytest.raises(ValueError, match="sql: cannot be combined with columns: or where:"):
        TableRule.model_validate({"table": "a.b", "sql": "SELECT * FROM source", "where": "a = 1"})


def test_a_query_has_a_fingerprint() -> None:
    transforms = [
        Transform(),
        Transform(sql="SELECT 1"),
        Transform(sql="SELECT 2"),
        Transform(where="SELECT 1"),
    ]
    assert len({each.fingerprint for each in transforms}) == 4


def test_a_selected_column_names_its_source_columns() -> None:
    columns = (Selected("id", '"long"', ("id",), is_plain=True), Selected("x", '"byte"', ("name", "text")))
    fitted = Transform(sql="…", analyse=lambda text, given: Analysis(columns, ("pay",))).fit(TABLE)
    assert [column.name for column in fitted.condition_columns] == ["pay"]
    assert [column.name for column in fitted.query_columns] == ["name", "text", "pay"]
    assert fitted.schema.columns[1].arrow_type == pa.int16(), "few targets have a type of one byte"
