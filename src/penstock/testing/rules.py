"""Marks on conformance tests. A mark names the sentences of a contract document that the test covers.

The contracts follow documents of other projects. `docs/reference/contracts.md` is generated from the marks.
The documents are in `tools/contract_documents` of the repository, not in this package, so that the suites run
without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeVar

_SENTENCES: Final = "penstock_rules"

Test = TypeVar("Test", bound=Callable[..., object])


def rule(document: str, *sentences: str) -> Callable[[Test], Test]:
    """Decorator that names the sentences of a contract document that a test covers.

    ```python
    @rule("change_capture", "live()", "acks")
    def test_unconfirmed_changes_are_redelivered_after_every_restart(self, harness): ...
    ```
    """
    if not sentences:
        raise LookupError(f"@rule({document!r}) names no sentence")

    def mark(test: Test) -> Test:
        setattr(
            test, _SENTENCES, (*((document, sentence) for sentence in sentences), *covered_sentences(test))
        )
        return test

    return mark


def covered_sentences(test: Callable[..., object]) -> tuple[tuple[str, str], ...]:
    """The marks of a test, as pairs of a document and the name of a sentence."""
    pairs: tuple[tuple[str, str], ...] = getattr(test, _SENTENCES, ())
    return pairs


def suite_tests(suite: type) -> Iterator[Callable[..., object]]:
    """The tests of a suite in order of definition."""
    named = {name: value for parent in reversed(suite.__mro__) for name, value in vars(parent).items()}
    return (test for name, test in named.items() if name.startswith("test_") and callable(test))
