"""Which sentences of the documents behind our contracts the tests of the suites hold.

A document is a file in `documents/`: its methods, its sentences, each under a short name, and where a sentence cannot be a matter for every
implementation, the tests that hold it for ours. A test of a suite says what it holds, once for each document:

```python
@rule("change_capture", "live()", "acks")
def test_unconfirmed_changes_come_again_after_every_restart(self, harness: CaptureHarness) -> None: ...
```

`docs/reference/contracts.md` is made of this, and a sentence that no test holds fails a test.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final, TypeVar

DOCUMENTS: Final = ("change_capture", "wal_change_capture", "source_connector", "reference_table_source", "record_source", "mistakes")
"""By name, in the order of the page."""

_HELD: Final = "penstock_rules"

Test = TypeVar("Test", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Document:
    """What somebody else's documentation says, and what we make of it."""

    name: str
    title: str
    origin: str
    contract: str
    """The module that has it in Python, if there is one."""
    column: str
    """What its sentences are called on the page."""
    sentences: Mapping[str, str]
    """By short name. A method is a sentence too, and its short name ends with `()`."""
    notes: Mapping[str, str]
    """What a sentence means here, where that is not to the letter what it says."""
    tests: Mapping[str, tuple[str, ...]]
    """Tests outside the suites, of our own implementation, by the sentence that they hold."""


def rule(document: str, *sentences: str) -> Callable[[Test], Test]:
    """Say which sentences of a document a test holds. Others of other documents go into a decorator of their own."""
    unknown = [sentence for sentence in sentences if sentence not in load_document(document).sentences]
    if unknown or not sentences:
        raise LookupError(f"{document} has no sentence under the name {', '.join(unknown) or '(none)'}")

    def note(test: Test) -> Test:
        setattr(test, _HELD, (*((document, sentence) for sentence in sentences), *getattr(test, _HELD, ())))
        return test

    return note


@cache
def load_document(name: str) -> Document:
    text = files("penstock.testing").joinpath("documents", f"{name}.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    methods = {f"{method}()": f"`{method}`" for method in table["methods"]}
    tests = {sentence: tuple(names) for sentence, names in table.get("tests", {}).items()}
    return Document(
        name,
        table["title"],
        table["origin"],
        table["contract"],
        table.get("column", "the document says"),
        methods | table["sentences"],
        dict(table.get("notes", {})),
        tests,
    )


def suite_tests(suite: type) -> Iterator[Callable[..., object]]:
    """The tests of a suite, in the order in which it has them."""
    named = {name: value for parent in reversed(suite.__mro__) for name, value in vars(parent).items()}
    return (test for name, test in named.items() if name.startswith("test_") and callable(test))


def held_by(test: Callable[..., object]) -> tuple[tuple[str, str], ...]:
    """Pairs of document and sentence."""
    found: tuple[tuple[str, str], ...] = getattr(test, _HELD, ())
    return found


def holders_of(document: Document, suites: Iterable[type]) -> dict[str, list[str]]:
    """Every sentence of a document, with the names of the tests that hold it: those of the suites first."""
    found: dict[str, list[str]] = {sentence: [] for sentence in document.sentences}
    for suite in suites:
        for test in suite_tests(suite):
            for sentence in (sentence for name, sentence in held_by(test) if name == document.name):
                found[sentence].append(test.__name__)
    for sentence, names in document.tests.items():
        found[sentence] += names
    return found
