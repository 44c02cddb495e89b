"""Unsupported options are refused at once, with an error code and without secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from penstock.errors import SlotMissingError, parse_error
from tests.support.source.stream import BatchRefusedError, ChangeSource

pytestmark = pytest.mark.source

NEEDLE = "n33dle-in-the-hay"


def refuse(number: int) -> None:
    raise BatchRefusedError(f"batch {number}")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"table": "public.nothing"}, "PEN-1401", "public.nothing"),
        ({"table": "orders"}, "PEN-1001", "'table'"),
        ({"tables": "public.orders"}, "PEN-1001", "both given"),
        ({"slot": "Orders"}, "PEN-1001", "'Orders'"),
        ({"maxRowPerBatch": "5"}, "PEN-1001", "maxRowsPerBatch"),
        ({"dsn": ""}, "PEN-1001", "'dsn' is missing"),
        ({"dsn": "nonsense"}, "PEN-1001", "connection string"),
        ({"dsn": "postgresql://cdc@127.0.0.1:1/x"}, "PEN-1101", "cdc@127.0.0.1:1/x"),
        ({"segmentRows": "many"}, "PEN-1001", "segmentRows"),
    ],
)
def test_option_that_leads_nowhere_is_named(
    source: ChangeSource, options: dict[str, str], code: str, words: str
) -> None:
    with pytest.raises(PySparkException) as raised:
        source.reader({"password": NEEDLE, **options}).load()
    assert code in str(raised.value)
    assert words in str(raised.value)
    assert NEEDLE not in str(raised.value)


def test_password_inside_the_dsn_is_refused_since_plans_would_show_it(source: ChangeSource) -> None:
    with pytest.raises(PySparkException) as raised:
        source.reader({"dsn": f"postgresql://cdc:{NEEDLE}@127.0.0.1/x"}).load()
    assert "PEN-1001" in str(raised.value)
    assert NEEDLE not in str(raised.value)


def test_column_with_one_of_our_names_is_refused(source: ChangeSource) -> None:
    source.database.execute("CREATE TABLE reserved (id int PRIMARY KEY, _ordinal int)")
    with pytest.raises(PySparkException, match="PEN-1404"):
        source.reader({"table": "public.reserved"}).load()


def test_password_is_nowhere_to_be_seen(source: ChangeSource, capsys: pytest.CaptureFixture[str]) -> None:
    # The embedded server accepts every password; a server given by PENSTOCK_TEST_PG does not.
    password = source.options.get("password", NEEDLE)
    source.reader({"password": password}).load().explain(extended=True)
    run = source.start(password=password)
    source.insert(1, 3)
    run.wait_for_rows(3)
    assert run.query is not None
    run.query.explain(extended=True)
    seen = capsys.readouterr().out + str(run.query.lastProgress) + json.dumps(run.query.status)
    run.finish()
    source.drop_slot()
    failed = source.start(password=password)
    seen += failed.wait_for_failure()
    assert failed.query is not None
    assert "public.orders" in seen
    assert password not in seen
    assert [
        path
        for path in written(source.checkpoint) + written(source.spool)
        if password.encode() in path.read_bytes()
    ] == []


def test_failure_of_the_capture_reaches_the_query_with_its_code(source: ChangeSource) -> None:
    run = source.start()
    source.insert(1, 3)
    run.wait_for_rows(3)
    run.finish()
    source.drop_slot()
    error = parse_error(source.start().wait_for_failure())
    assert isinstance(error, SlotMissingError)
    assert error.hint


def test_slot_that_is_gone_is_a_hole_although_the_spool_is_gone_too(source: ChangeSource) -> None:
    run = source.start()
    source.insert(1, 3)
    run.wait_for_rows(3)
    run.finish()
    source.drop_slot()
    source.delete_spool()
    source.insert(4, 6)
    failed = source.start()
    assert "PEN-1201" in failed.wait_for_failure()
    assert failed.rows == []
    source.provision()
    failed = source.start()
    assert "PEN-1205" in failed.wait_for_failure()
    assert failed.rows == []


def test_first_batch_that_can_no_longer_be_repeated_is_a_hole(source: ChangeSource) -> None:
    source.insert(1, 3)
    source.start(refuse).wait_for_failure()
    source.drop_slot()
    source.delete_spool()
    source.provision()
    failed = source.start()
    assert "PEN-2003" in failed.wait_for_failure()
    assert failed.rows == []


def test_table_that_changed_its_shape_stops_the_query(source: ChangeSource) -> None:
    run = source.start()
    source.insert(1, 3)
    run.wait_for_rows(3)
    source.database.execute("ALTER TABLE orders ADD more int")
    source.insert(4, 4)
    assert "PEN-1403" in run.wait_for_failure()


def written(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
