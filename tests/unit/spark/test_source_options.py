"""Options of the Spark source: the requested settings, and errors for contradictory ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.capture.settings import CAPTURE_OPTIONS
from penstock.connectors.settings import CONNECTOR_OPTIONS, ConnectorSettings
from penstock.errors import ConfigError
from penstock.options import OptionTable
from penstock.position import Position
from penstock.schema import TableName
from penstock.spark.options import SOURCE_OPTIONS, check_options
from penstock.spark.request import SourceRequest, TableChoice

DSN = {"dsn": "postgresql://cdc@db.example/shop"}


def test_every_option_of_a_capture_is_one_of_the_source_except_internal_ones() -> None:
    # Executors read the options too, and a file of the driver's machine does not exist there.
    assert CAPTURE_OPTIONS.keys - SOURCE_OPTIONS.keys == {
        "form",
        "messageprefixes",
        "polling",
        "bytriggers",
        "passwordfile",
    }


@pytest.mark.parametrize("table", [SOURCE_OPTIONS, CONNECTOR_OPTIONS, CAPTURE_OPTIONS])
def test_names_are_unique_in_any_case_and_every_option_is_described(table: OptionTable) -> None:
    assert len(table.keys) == len(table.options)
    assert all(
        option.name and option.kind.name and (option.description or option.is_internal)
        for option in table.options
    )


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("maxRowPerBatch", "maxRowsPerBatch"),
        ("startPosition", "startingPosition"),
        ("tabel", "table"),
        ("Slots", "slot"),
    ],
)
def test_unknown_option_is_refused_and_the_near_ones_are_named(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_options({**DSN, name: "x"})
    assert repr(name) in raised.value.message
    assert near in str(raised.value.hint)


def test_option_like_no_other_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="there is no option 'zzz'"):
        check_options({**DSN, "zzz": ""})


def test_all_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match="'dsn' and 'spool' are missing"):
        ConnectorSettings.from_options({"slot": "s"})
    with pytest.raises(ConfigError, match="'dsn' is missing"):
        check_options({"dsn": ""})


def test_names_count_in_any_case() -> None:
    assert check_options({"DSN": "a", "MAXROWSPERBATCH": "5"}) == {"dsn": "a", "maxrowsperbatch": "5"}


def test_one_table_and_several_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="both given"):
        SourceRequest.parse({**DSN, "table": "public.a", "tables": "public.b"})


def test_defaults_are_enough_for_a_dsn_and_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    request = SourceRequest.parse({**DSN, "table": "public.orders"})
    settings = request.capture([TableName("public", "orders")])
    assert (settings.slot, settings.publication) == (
        "penstock_shop_public_orders",
        "penstock_shop_public_orders",
    )
    assert settings.spool == Path("/state/penstock/spool/db.example_5432/penstock_shop_public_orders")
    assert (request.consumer, request.start, request.end, request.columns) == (
        "spark-public.orders",
        "snapshot",
        None,
        (),
    )


@pytest.mark.parametrize(
    "dsns",
    [
        ("postgresql://cdc@db.example/shop", "postgresql://cdc@db.example:5433/shop"),
        ("postgresql://cdc@prod.example/shop", "postgresql://cdc@staging.example/shop"),
        ("host=/run/a user=cdc dbname=shop", "host=/run-a user=cdc dbname=shop"),
        ("host=a,b user=cdc dbname=shop", "host=a_b user=cdc dbname=shop"),
        ("host=a,b port=1,2 user=cdc dbname=shop", "host=a,b port=12 user=cdc dbname=shop"),
        (f"host={'x' * 80}1 dbname=shop", f"host={'x' * 80}2 dbname=shop"),
    ],
)
def test_two_servers_never_share_a_spool_by_default(dsns: tuple[str, str]) -> None:
    one, two = (SourceRequest.parse({"dsn": dsn, "table": "public.orders"}).capture() for dsn in dsns)
    assert one.slot == two.slot
    assert one.spool != two.spool
    for settings in (one, two):
        server = settings.spool.parent
        assert server.parent.name == "spool"
        assert len(server.name) <= 63
        assert not server.name.startswith(".")
    assert (
        SourceRequest.parse({"dsn": dsns[0].replace("cdc", "other"), "table": "public.orders"})
        .capture()
        .spool
        == one.spool
    )


@pytest.mark.parametrize("table", ["public.Orders", 'public."a b"', "public." + "x" * 80])
def test_default_slot_is_a_name_that_the_server_takes_and_another_for_each_table(table: str) -> None:
    slot = SourceRequest.parse({**DSN, "table": table}).capture().slot
    assert (
        slot
        != SourceRequest.parse({**DSN, "table": table + "2" if '"' not in table else "public.a_b"})
        .capture()
        .slot
    )
    assert len(slot) <= 63
    assert slot.replace("_", "").isalnum()
    assert slot == slot.lower()


def test_tables_are_names_or_patterns_split_at_commas_outside_of_quotes() -> None:
    choice = TableChoice.parse({"tables": 'public.*, sales."a,b", x.t?'})
    assert choice.patterns == (TableName("public", "*"), TableName("sales", "a,b"), TableName("x", "t?"))
    wanted = {TableName("public", "any"), TableName("sales", "a,b"), TableName("x", "t1")}
    other = {TableName("Public", "any"), TableName("sales", "b"), TableName("x", "t12")}
    assert {name for name in wanted | other if choice.selects(name)} == wanted


def test_no_table_at_all_is_every_table() -> None:
    assert TableChoice.parse({}).selects(TableName("any", "thing"))


def test_a_single_name_is_no_pattern() -> None:
    assert not TableChoice.parse({"table": "public.*"}).selects(TableName("public", "orders"))


@pytest.mark.parametrize(
    ("text", "start"),
    [("SNAPSHOT", "snapshot"), ("now", "now"), ("Slot", "slot"), ("0/16B3748", Position.of(0x16B3748))],
)
def test_starting_position_is_a_word_or_a_position(text: str, start: object) -> None:
    assert SourceRequest.parse({**DSN, "startingPosition": text}).start == start


@pytest.mark.parametrize(
    "option",
    [
        {"startingPosition": "latest"},
        {"endingPosition": "never"},
        {"chunkBytes": "0"},
        {"snapshotHoldSeconds": "-1"},
        {"maxTransactionsPerBatch": "many"},
        {"table": "orders"},
        {"tables": "public.a, b"},
    ],
)
def test_value_that_makes_no_sense_is_refused_by_its_name(option: dict[str, str]) -> None:
    (name,) = option
    with pytest.raises(ConfigError, match=f"'{name}'"):
        SourceRequest.parse({**DSN, **option})


def test_blocks_of_a_snapshot_are_bounded_by_rows_only_if_requested() -> None:
    plain = SourceRequest.parse(DSN)
    assert (plain.snapshot_admission.rows, plain.chunk_bytes) == (None, 32 << 20)
    asked = SourceRequest.parse({**DSN, "maxRowsPerBatch": "1000"})
    assert (asked.snapshot_admission.rows, asked.chunk_bytes) == (1000, 64_000)
    assert SourceRequest.parse({**DSN, "maxRowsPerBatch": "1"}).chunk_bytes == 8192
