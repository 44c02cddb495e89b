"""Options in text form, each declared once as a field of a settings class.

```python
@dataclass(frozen=True, slots=True)
class CaptureLimits:
    segment_rows: Annotated[int, Option("Rows at which a segment of the spool is sealed.", SIZE)] = 100_000
```

The declaration has the name (`segmentRows`, unless `Option.name` says otherwise), type, default and
description. Penstock derives four things from it: parsing, validation, the text form in which settings are
passed to the Spark source, and the pages in docs/reference. Names are case-insensitive, because Spark
lower-cases them.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Any, get_type_hints

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kind:
    """The type of an option's value and its text form."""

    name: str
    """The name in the reference pages."""
    parse: Callable[[str], Any]
    """Converts the text to the value. Raises ValueError for an invalid text."""
    expected: str = "valid"
    """Completes "the option 'x' is not …" in errors."""
    format: Callable[[Any], str] = str
    is_number: bool = False
    """Whether the kind is a number: an empty text is then an error if the option has a default. For other
    kinds an empty text means the default.
    """

    def named(self, name: str) -> Kind:
        """The same kind, shown in the reference under another name."""
        return replace(self, name=name)


def choice(*values: str, of: Callable[[str], Any] = str) -> Kind:
    """The kind of an option whose value is one of these words, case-insensitive. `of` converts the lower-case
    word to the option's value.
    """

    def parse(text: str) -> Any:
        if text.lower() not in values:
            raise ValueError(text)
        return of(text.lower())

    return Kind("choice", parse, f"one of {', '.join(values)}")


def switch(off: str, on: str) -> Kind:
    """A boolean written as one of two words."""
    return replace(choice(off, on, of=on.__eq__), format=lambda value: on if value else off)


def _positive_integer(text: str) -> int:
    if not text.strip().isdecimal() or int(text) == 0:
        raise ValueError(text)
    return int(text)


def _bound(number: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = number(text)
        if not 0 <= value < math.inf:
            raise ValueError(text)
        return value

    return parse


TEXT = Kind("text", str)
BOOLEAN = switch("false", "true").named("boolean")
COUNT = Kind("count", _positive_integer, "a number above 0", is_number=True)
SIZE = Kind("count", _bound(int), "a number of 0 or more", is_number=True)
SECONDS = Kind("seconds", _bound(float), "a number of seconds", is_number=True)
WHOLE = Kind("count", lambda text: int(_bound(float)(text)), "a number of 0 or more", is_number=True)
"""An integer. A fraction in the text is cut off."""
TEXTS = Kind("list", lambda text: tuple(json.loads(text)), "a JSON list", json.dumps)


@dataclass(frozen=True, slots=True)
class Option:
    """One option. In the annotation of a field, give only the description and the kind: the field provides
    the name and the default.
    """

    description: str
    kind: Kind = TEXT
    name: str = ""
    default: Any = None
    is_required: bool = False
    is_internal: bool = False
    """Set by Penstock itself; users do not write it, and reference pages omit it."""
    field: str = ""

    @property
    def key(self) -> str:
        return self.name.lower()

    @property
    def default_text(self) -> str:
        return self.text(self.default)

    def text(self, value: Any) -> str:
        return "" if value is None else self.kind.format(value)

    def read(self, given: Mapping[str, str]) -> Any:
        """The option's value in `given`, whose names are lower-case; the default if `given` does not have the
        option.

        Raises ConfigError for an invalid value.
        """
        text = given.get(self.key)
        is_left_out = text is None or (not text and (self.default is None or not self.kind.is_number))
        if text is None or is_left_out:
            return self.default
        try:
            return self.kind.parse(text)
        except ValueError:
            hint = (
                f"the default is {self.default_text}" if self.default_text else "leave it out, or correct it"
            )
            raise ConfigError(
                f"the option {self.name!r} is not {self.kind.expected}: {text!r}", hint=hint
            ) from None


@cache
def declared_options(settings: type) -> tuple[Option, ...]:
    """The options that the fields of a dataclass declare, in their order."""
    hints = get_type_hints(settings, include_extras=True)
    found = []
    for field in fields(settings):
        for option in getattr(hints[field.name], "__metadata__", ()):
            name = option.name or _camel_case(field.name)
            default = None if field.default is MISSING else field.default
            found.append(replace(option, name=name, default=default, field=field.name))
    return tuple(found)


def read_fields(settings: type, given: Mapping[str, str]) -> dict[str, Any]:
    """Read the values of all declared options; returns them by field name. The names in `given` are
    lower-case.
    """
    return {option.field: option.read(given) for option in declared_options(settings)}


def write_fields(settings: object) -> dict[str, str]:
    """The values of all declared options as text, by option name."""
    settings_class: type = type(settings)
    return {
        option.name: option.text(getattr(settings, option.field))
        for option in declared_options(settings_class)
    }


class OptionTable:
    """All options of one interface."""

    def __init__(self, options: Iterable[Option], *, page: str, example: str) -> None:
        """`page` is the documentation page of the options. `example` shows how to set an option, with
        `{name}` for its name.
        """
        self.options = tuple(options)
        self._by_key = {option.key: option for option in self.options}
        self._page = page
        self._example = example

    @property
    def keys(self) -> frozenset[str]:
        """The names in lower case."""
        return frozenset(self._by_key)

    def __getitem__(self, name: str) -> Option:
        return self._by_key[name.lower()]

    def check(self, options: Mapping[str, str]) -> dict[str, str]:
        """Check the names of `options`; returns the options with lower-case names, without empty values.

        Raises ConfigError for an unknown name. If required options are missing, one ConfigError names them
        all.
        """
        for name in options:
            if name.lower() not in self._by_key:
                raise self._unknown(name)
        given = {name.lower(): value for name, value in options.items() if value not in (None, "")}
        self.check_required(given)
        return given

    def check_required(self, given: Mapping[str, str]) -> None:
        missing = [option.name for option in self.options if option.is_required and not given.get(option.key)]
        if missing:
            *others, last = map(repr, missing)
            names = f"{', '.join(others)} and {last}" if others else last
            raise ConfigError(
                f"the option{'s' if others else ''} {names} {'are' if others else 'is'} missing",
                hint=f"add {' '.join(self._example.format(name=name) for name in missing)}",
            )

    def _unknown(self, name: str) -> ConfigError:
        near = [self._by_key[key].name for key in difflib.get_close_matches(name.lower(), self._by_key, n=3)]
        hint = f"did you mean {' or '.join(near)}?" if near else f"see {self._page} for all options"
        return ConfigError(f"there is no option {name!r}", hint=hint)


def _camel_case(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)
