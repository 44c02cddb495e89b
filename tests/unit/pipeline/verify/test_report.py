"""The report of `penstock verify`, without a comparison."""

from __future__ import annotations

import io
import json

from rich.console import Console

from penstock.cli.verify import exit_code, print_report
from penstock.pipeline.table_states import TableState
from penstock.pipeline.verify.compare import ColumnDifference, Comparison, RowDifference
from penstock.pipeline.verify.verify import TableVerdict, VerifyReport
from penstock.position import Position
from penstock.schema import TableName

AT = Position.of(0x16B3748)
EQUAL = TableVerdict(
    TableName("shop", "a"), TableState.STREAMING, AT, Comparison(TableName("shop", "a"), 3, 3)
)
EXAMPLES = (
    RowDifference(
        "different",
        {"id": "7"},
        (ColumnDifference("note", None, "[red]" + "x" * 100), ColumnDifference("n", "1", "2")),
    ),
    RowDifference("missing", {"id": "8"}),
)
DIFFERENT = TableVerdict(
    TableName("shop", "b"),
    TableState.STREAMING,
    AT,
    Comparison(TableName("shop", "b"), 5, 4, 1, 0, 3, {"note": 3, "n": 1}, EXAMPLES, has_equal_digests=False),
)
HELD = TableVerdict(
    TableName("shop", "d"), TableState.STREAMING, AT, Comparison(TableName("shop", "d"), 3, 3, held=1_234)
)
FAILED = TableVerdict(
    TableName("shop", "c"), TableState.FAILED, AT, reason="PEN-1403: it changed", remedy="remove it"
)


def _printed(*verdicts: TableVerdict) -> str:
    stream = io.StringIO()
    print_report(VerifyReport("shop", verdicts, 1.25), Console(file=stream, width=120))
    return stream.getvalue()


def test_every_difference_is_printed_with_key_column_and_both_values() -> None:
    lines = [line.split() for line in _printed(EQUAL, DIFFERENT).splitlines()]
    assert ["shop.a", "3", "3", "0", "0", "0", "equal"] in lines
    assert ["shop.b", "5", "4", "1", "0", "3", "different"] in lines
    assert ["different", "id=7", "n", "1", "2"] in lines
    assert ["missing", "id=8"] in lines
    assert any(
        line[:4] == ["different", "id=7", "note", "null"] and line[4].startswith("[red]xx") for line in lines
    )
    assert ["and", "2", "more", "different"] in lines


def test_a_table_that_was_not_compared_is_printed_with_its_state_and_remedy() -> None:
    printed = _printed(FAILED)
    assert "shop.c is failed and was not compared: PEN-1403: it changed" in printed
    assert "fix: remove it" in printed


def test_only_tables_that_were_compared_count_as_equal() -> None:
    assert VerifyReport("shop", [EQUAL], 1.0).equal
    assert not VerifyReport("shop", [EQUAL, FAILED], 1.0).equal
    assert not VerifyReport("shop", [EQUAL, DIFFERENT], 1.0).equal


def test_C08_rows_in_dead_letters_are_counted_separately_and_have_their_own_exit_code() -> None:
    assert [
        "shop.d",
        "3",
        "3",
        "0",
        "0",
        "0",
        "equal,",
        "except",
        "1,234",
        "rows",
        "in",
        "the",
        "dead-letter",
        "queue",
    ] in [line.split() for line in _printed(HELD).splitlines()]
    codes = {
        exit_code(VerifyReport("shop", verdicts, 1.0)): verdicts
        for verdicts in ([EQUAL], [EQUAL, HELD], [HELD, DIFFERENT], [HELD, FAILED])
    }
    assert codes == {0: [EQUAL], 5: [EQUAL, HELD], 4: [HELD, FAILED]}
    document = VerifyReport("shop", [HELD], 1.0).as_document()
    assert document["equal"] is False
    assert '"held": 1234' in json.dumps(document)


def test_the_document_is_plain_and_whole() -> None:
    document = json.loads(json.dumps(VerifyReport("shop", [DIFFERENT, FAILED], 1.0).as_document()))
    assert (document["pipeline"], document["equal"], set(document["tables"])) == (
        "shop",
        False,
        {"shop.b", "shop.c"},
    )
    different = document["tables"]["shop.b"]
    assert (different["source_rows"], different["missing"], different["columns"]) == (
        5,
        1,
        {"note": 3, "n": 1},
    )
    assert different["examples"][0]["columns"][1] == {"column": "n", "source": "1", "target": "2"}
    assert different["position"] == "0/16B3748"
    failed = document["tables"]["shop.c"]
    assert (failed["state"], failed["compared"], failed["equal"], failed["remedy"]) == (
        "failed",
        False,
        False,
        "remove it",
    )
