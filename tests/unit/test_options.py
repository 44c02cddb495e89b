"""Options in text form, declared by the fields of a settings class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest

from penstock.errors import ConfigError
from penstock.options import (
    BOOLEAN,
    COUNT,
    SECONDS,
    SIZE,
    WHOLE,
    Kind,
    Option,
    OptionTable,
    choice,
    declared_options,
    read_fields,
    switch,
    write_fields,
)


@dataclass(frozen=True, slots=True)
class Settings:
    address: str
    slot_name: Annotated[str, Option("The slot.", is_required=True)]
    is_separate: Annotated[bool, Option("Where.", switch("embedded", "separate"), name="process")] = False
    segment_rows: Annotated[int, Option("Rows.", SIZE)] = 100
    limit: Annotated[int | None, Option("Limit.", COUNT)] = None


TABLE = OptionTable(declared_options(Settings), page="docs/reference/x.md", example='{name}="…"')


def test_a_field_declares_name_default_and_text_form() -> None:
    found = [(option.name, option.default_text) for option in declared_options(Settings)]
    assert found == [("slotName", ""), ("process", "embedded"), ("segmentRows", "100"), ("limit", "")]


def test_settings_survive_their_text_form() -> None:
    settings = Settings("a", "s", True, 7, None)
    given = {name.lower(): text for name, text in write_fields(settings).items()}
    assert Settings("a", **read_fields(Settings, given)) == settings


def test_an_option_that_is_left_out_or_empty_has_its_default() -> None:
    assert read_fields(Settings, {"slotname": "s", "process": "", "limit": ""}) == {
        "slot_name": "s",
        "is_separate": False,
        "segment_rows": 100,
        "limit": None,
    }


@pytest.mark.parametrize(
    ("kind", "valid", "value"),
    [
        (COUNT, " 5 ", 5),
        (SIZE, "0", 0),
        (WHOLE, "1e3", 1000),
        (SECONDS, "0.5", 0.5),
        (BOOLEAN, "True", True),
        (choice("a", "b"), "B", "b"),
    ],
)
def test_a_value_is_parsed_by_its_kind(kind: Kind, valid: str, value: object) -> None:
    assert Option("", kind, "x").read({"x": valid}) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (COUNT, "0"),
        (COUNT, "1_000"),
        (SIZE, "-1"),
        (SIZE, "1.5"),
        (SECONDS, "nan"),
        (SECONDS, "inf"),
        (SECONDS, ""),
        (WHOLE, "many"),
        (BOOLEAN, "yes"),
    ],
)
def test_an_invalid_value_is_refused_by_name_and_text(kind: Kind, text: str) -> None:
    with pytest.raises(ConfigError, match=f"the option 'x' is not .*: {text!r}") as caught:
        Option("", kind, "x", default=1).read({"x": text})
    assert caught.value.hint


def test_unknown_and_missing_options_are_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="there is no option 'segmentRow'") as unknown:
        TABLE.check({"segmentRow": "1"})
    assert unknown.value.hint == "did you mean segmentRows?"
    with pytest.raises(ConfigError, match="the option 'slotName' is missing") as missing:
        TABLE.check({"SegmentRows": "1"})
    assert missing.value.hint == 'add slotName="…"'
