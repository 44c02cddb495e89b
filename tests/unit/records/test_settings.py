"""Settings of a record source."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError, InvalidUrlError, NoTableError
from penstock.records.source import PostgresRecordSource, RecordSettings
from penstock.schema import TableName

GOOD = {
    "url": "postgresql://cdc@db.example/shop",
    "table": "public.orders",
    "slot": "orders",
    "spool": "/spool",
}


def test_required_settings_are_enough() -> None:
    settings = RecordSettings.parse(GOOD)
    assert (settings.table, settings.columns, settings.takes_snapshot) == (
        TableName("public", "orders"),
        (),
        True,
    )
    assert (settings.capture.slot, settings.capture.publication, settings.capture.tables) == (
        "orders",
        "orders",
        (),
    )


def test_optional_settings_are_read_in_any_letter_case() -> None:
    settings = RecordSettings.parse(
        {
            **GOOD,
            "Columns": "id, note",
            "snapshot": "never",
            "waitSeconds": "0",
            "PUBLICATION": "p",
            "quietSeconds": "0.5",
        }
    )
    assert (settings.columns, settings.takes_snapshot, settings.wait_seconds) == (("id", "note"), False, 0.0)
    assert (settings.capture.publication, settings.capture.limits.quiet_seconds) == ("p", 0.5)


@pytest.mark.parametrize("table", [None, "", "  ", "orders", "a.b.c"])
def test_missing_table_is_a_separate_error(table: str | None) -> None:
    config = {name: value for name, value in {**GOOD, "table": table}.items() if value is not None}
    with pytest.raises(NoTableError):
        RecordSettings.parse(config)


@pytest.mark.parametrize("url", [None, "", "shop", "http://db.example"])
def test_invalid_address_is_a_separate_error(url: str | None) -> None:
    config = {name: value for name, value in {**GOOD, "url": url}.items() if value is not None}
    with pytest.raises(InvalidUrlError):
        RecordSettings.parse(config)


@pytest.mark.parametrize(
    "wrong",
    [
        {"slot": ""},
        {"spool": ""},
        {"slot": "No-Slot"},
        {"snapshot": "sometimes"},
        {"waitSeconds": "soon"},
        {"waitSeconds": "-1"},
        {"waitSeconds": "nan"},
        {"dsn": "postgresql://elsewhere"},
        {"colums": "id"},
        {"capture": "embedded"},
        {"process": "separate"},
        {"polling": "{}"},
        {"byTriggers": "true"},
    ],
)
def test_all_else_that_is_wrong_is_a_matter_of_configuration(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        RecordSettings.parse({**GOOD, **wrong})


@pytest.mark.parametrize("given", [{"url": "postgresql://cdc:hush@db.example/shop"}, {"password": "hush"}])
def test_password_is_taken_out_of_sight(given: dict[str, str]) -> None:
    settings = RecordSettings.parse({**GOOD, **given})
    assert settings.capture.address.password is not None
    assert settings.capture.address.password.reveal() == "hush"
    assert "hush" not in repr(settings)


@pytest.mark.parametrize("name", ["url", "table"])
def test_required_setting_that_is_none_is_missing(name: str) -> None:
    config: dict[str, str | None] = {**GOOD, name: None}
    with pytest.raises(ConfigError, match=f"the option '{name}' is missing"):
        RecordSettings.parse(config)


def test_setting_that_is_none_has_its_default() -> None:
    config: dict[str, str | None] = {
        **GOOD,
        **dict.fromkeys(("columns", "snapshot", "waitSeconds", "publication")),
    }
    assert RecordSettings.parse(config) == RecordSettings.parse(GOOD)


@pytest.mark.parametrize("name", ["slot", "spool"])
def test_missing_option_is_named_in_the_form_of_a_config(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the option '{name}' is missing") as raised:
        RecordSettings.parse({key: value for key, value in GOOD.items() if key != name})
    assert raised.value.hint == f'add "{name}": "…"'


def test_source_that_was_torn_down_and_never_opened_says_so() -> None:
    source = PostgresRecordSource()
    source.teardown()
    with pytest.raises(ConfigError, match="has been closed"):
        source.open(GOOD)
