"""Capture settings, and their form as options of the Spark source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.capture.polling.settings import PollingSettings
from penstock.capture.settings import CaptureLimits, CaptureSettings, Confirm, PollingRules
from penstock.capture.trigger.feed import TriggerSettings
from penstock.connectors.settings import ConnectorSettings
from penstock.errors import ConfigError
from penstock.postgres.connection import SourceAddress
from penstock.postgres.types.column import TypePolicy
from penstock.records.source import RecordSettings
from penstock.reference import ParquetKeyedTable, ParquetReferenceTable, keep
from penstock.schema import TableName
from penstock.secret import Secret
from penstock.spark.request import SourceRequest

NEEDLE = "n33dle-in-the-hay"
LEAST = {"dsn": "postgresql://cdc@db.example/shop", "slot": "s", "spool": "/spool"}


def test_settings_survive_the_way_through_options() -> None:
    settings = CaptureSettings(
        SourceAddress.parse("postgresql://cdc@db.example:6432/shop?sslmode=require", Secret(NEEDLE)),
        "slot",
        "publication",
        Path("/var/spool"),
        (
            TableName("public", "a,b"),
            TableName("Odd s", 'with "quotes", and.dots'),
            TableName("public", "line\nbreak"),
        ),
        CaptureLimits(segment_rows=7, segment_seconds=0.25, spool_bytes=1 << 40),
        failover=True,
        confirm=Confirm.SPOOLED,
        max_retained_bytes=1 << 33,
        types=TypePolicy("string", "error"),
        message_prefixes=("penstock", 'a,"b"'),
        polling=PollingRules(
            0.5, "updated_at", ((TableName("public", 'a "b"'), "xmin"),), True, Path("/state/polling")
        ),
    )
    assert CaptureSettings.from_options(settings.to_options()) == settings
    folded = {name.lower(): value for name, value in settings.to_options().items()}
    assert CaptureSettings.from_options(folded) == settings


def test_a_directory_is_the_one_that_it_was_when_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with another working directory would write a second spool there."""
    monkeypatch.chdir(tmp_path)
    address, here, resume = SourceAddress.parse(LEAST["dsn"]), Path("./spool"), Path("./resume")
    found = [
        CaptureSettings.from_options({**LEAST, "spool": "spool"}).spool,
        TriggerSettings(address, "s", here).spool,
        PollingSettings(address, "s", here, (), PollingRules()).spool,
    ]
    rules = PollingRules(resume=resume)
    monkeypatch.undo()
    assert found == [tmp_path / "spool"] * 3
    assert rules.resume == tmp_path / "resume"


def test_only_dsn_slot_and_spool_must_be_given() -> None:
    settings = CaptureSettings.from_options(LEAST)
    assert (settings.publication, settings.tables, settings.limits) == ("s", (), CaptureLimits())
    assert settings.address.password is None


@pytest.mark.parametrize("missing", sorted(LEAST))
def test_missing_option_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"'{missing}' is missing"):
        CaptureSettings.from_options({name: value for name, value in LEAST.items() if name != missing})


@pytest.mark.parametrize("text", ["many", "", "-1", "nan", "inf", "0x10"])
def test_limit_that_is_no_bound_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="'segmentSeconds' is not a number"):
        CaptureSettings.from_options({**LEAST, "segmentSeconds": text})


@pytest.mark.parametrize("option", [{"numeric": "decimal(40,2)"}, {"onUnrepresentable": "ignore"}])
def test_a_policy_about_types_that_makes_no_sense_is_refused(option: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="an option about types is wrong"):
        CaptureSettings.from_options({**LEAST, **option})


@pytest.mark.parametrize(
    "dsn", [f"postgresql://cdc:{NEEDLE}@db.example/shop", f"host=db.example password={NEEDLE}"]
)
def test_password_inside_the_dsn_is_refused_and_not_repeated(dsn: str) -> None:
    with pytest.raises(ConfigError, match="contains a password") as raised:
        CaptureSettings.from_options({**LEAST, "dsn": dsn, "password": "another"})
    assert NEEDLE not in str(raised.value)


def test_password_is_in_no_option_but_its_own() -> None:
    settings = CaptureSettings.from_options({**LEAST, "password": NEEDLE})
    assert [name for name, value in settings.to_options().items() if NEEDLE in value] == ["password"]
    assert NEEDLE not in repr(settings)


@pytest.mark.parametrize(
    ("option", "text"),
    [("failover", "maybe"), ("confirm", "later"), ("maxRetainedWal", "-5"), ("slot", "No-Slot")],
)
def test_option_that_means_nothing_is_refused(option: str, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        CaptureSettings.from_options({**LEAST, option: text})
    assert text in str(raised.value)
    assert raised.value.hint


def test_name_that_no_slot_or_several_publications_have_is_refused_before_any_connection() -> None:
    """Otherwise the capture would create the publication, and then fail to create the slot."""
    address, spool = SourceAddress.parse(LEAST["dsn"]), Path("/spool")
    with pytest.raises(ConfigError, match="'No-Slot' cannot be the name of a replication slot"):
        CaptureSettings(address, "No-Slot", "p", spool)
    with pytest.raises(ConfigError, match="lists several: a,b"):
        CaptureSettings(address, "s", "a,b", spool)


@pytest.mark.parametrize("url", ["s3://bucket/spool", "gs://bucket/spool"])
def test_a_spool_or_a_reference_in_an_object_store_is_refused(url: str) -> None:
    address = SourceAddress.parse(LEAST["dsn"])
    given: list[Callable[[], object]] = [
        lambda: CaptureSettings(address, "s", "p", Path(url)),
        lambda: CaptureSettings.from_options({**LEAST, "spool": url}),
        lambda: SourceRequest.parse({**LEAST, "table": "public.t", "spool": url}).capture(),
        lambda: ConnectorSettings.from_options({**LEAST, "tables": "public.t", "spool": url}),
        lambda: RecordSettings.parse({"url": LEAST["dsn"], "table": "public.t", "slot": "s", "spool": url}),
        lambda: TriggerSettings(address, "s", Path(url)),
        lambda: PollingSettings(address, "s", Path(url), (), PollingRules()),
        lambda: PollingRules(resume=Path(url)),
        lambda: ParquetReferenceTable(url, ["id"]),
        lambda: ParquetKeyedTable.inspect(url, ["id"]),
        lambda: keep(ParquetReferenceTable("/table", ["id"]), url),
    ]
    for each in given:
        with pytest.raises(ConfigError, match=r"URLs are not supported: .*, such as /mnt/lake") as caught:
            each()
        assert caught.value.code == "PEN-1001"
    assert CaptureSettings.from_options({**LEAST, "spool": "file:///mnt/spool"}).spool == Path("/mnt/spool")
