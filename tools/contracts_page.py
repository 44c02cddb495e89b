"""Reference page of the contracts: every sentence of the documents behind them, with the tests that cover it.

A document is a TOML file in `contract_documents/`. Conformance tests name the sentences that they cover with
`penstock.testing.rules.rule`; tests of our own implementations are listed in the file. A test fails if a
sentence is not covered.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from penstock.testing.capture_conformance import ChangeCaptureConformance
from penstock.testing.connector_conformance import SourceConnectorConformance
from penstock.testing.provisioning_conformance import CaptureProvisioningConformance
from penstock.testing.record_source_conformance import RecordSourceConformance
from penstock.testing.records_conformance import CdcIteratorConformance, SnapshotterConformance
from penstock.testing.reference_conformance import ReferenceTableConformance
from penstock.testing.rules import covered_sentences, suite_tests

_FOLDER = Path(__file__).parent / "contract_documents"

SUITES: Mapping[str, tuple[type, ...]] = {
    "change_capture": (ChangeCaptureConformance,),
    "wal_change_capture": (CaptureProvisioningConformance,),
    "source_connector": (SourceConnectorConformance,),
    "reference_table_source": (ReferenceTableConformance,),
    "record_source": (RecordSourceConformance, SnapshotterConformance, CdcIteratorConformance),
    "mistakes": (),
}
"""The conformance suites of each document, in the order of the page.

A test may also cover sentences of other documents.
"""

_INTRO = """\
# Contracts

<!-- Generated from tools/contract_documents and src/penstock/testing by `make docs`. -->

The contracts of Penstock's Python interfaces are the docstrings in `penstock.contracts`. They follow documents of other projects. This page
lists every method and every normative sentence of those documents, with the tests that check it. Most tests are in the suites of
`penstock.testing`, which run against all implementations in Penstock and can run against yours. Tests marked with ° cover Penstock's
implementation only.
"""


@dataclass(frozen=True, slots=True)
class Document:
    """Documentation of another project that a contract follows."""

    name: str
    title: str
    origin: str
    contract: str
    """The module with the contract in Python; empty if there is none."""
    column: str
    """Heading of the column of sentences on the page."""
    sentences: Mapping[str, str]
    """By short name. A method counts as a sentence, and its short name ends with `()`."""
    notes: Mapping[str, str]
    """How Penstock reads a sentence, where it differs from the letter."""
    tests: Mapping[str, tuple[str, ...]]
    """Tests of our own implementations, by the sentence that they cover."""


@cache
def load_document(name: str) -> Document:
    table = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
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


def covering_tests(document: Document, suites: Iterable[type]) -> dict[str, list[str]]:
    """For every sentence of a document, the names of the tests that cover it, those of the suites first.

    Raises LookupError for a mark on a test that names an unknown sentence.
    """
    covered: dict[str, list[str]] = {sentence: [] for sentence in document.sentences}
    for suite in suites:
        for test in suite_tests(suite):
            for sentence in _sentences_of(test, document):
                if sentence not in covered:
                    raise LookupError(
                        f"{document.name} has no sentence {sentence!r}, which {test.__name__} names"
                    )
                covered[sentence].append(test.__name__)
    for sentence, names in document.tests.items():
        covered[sentence] += names
    return covered


def uncovered(document: Document) -> list[str]:
    """The sentences that no test covers."""
    return [sentence for sentence, tests in covering_tests(document, _all_suites()).items() if not tests]


def contracts_page() -> str:
    """One section for each document."""
    documents = map(load_document, SUITES)
    return "\n".join([_INTRO, *(line for document in documents for line in _section(document))])


def _section(document: Document) -> Iterator[str]:
    suites = SUITES[document.name]
    yield f"## {document.title}"
    yield ""
    yield f"From {document.origin}.{_location(document, suites)}"
    yield ""
    yield f"| {document.column} | tests |"
    yield "|---|---|"
    for sentence, tests in covering_tests(document, _all_suites()).items():
        yield f"| {_sentence_cell(document, sentence)} | {_tests_cell(document, sentence, tests)} |"
    additional = [
        test.__name__ for suite in suites for test in suite_tests(suite) if not covered_sentences(test)
    ]
    if additional:
        yield ""
        yield "Additional rules of Penstock:"
        yield ""
        yield from (f"- `{name}`" for name in additional)
    yield ""


def _location(document: Document, suites: tuple[type, ...]) -> str:
    if not suites:
        return ""
    paths = ", ".join(f"`{suite.__module__}.{suite.__name__}`" for suite in suites)
    return f" In Python: `{document.contract}`. Suites: {paths}."


def _sentence_cell(document: Document, sentence: str) -> str:
    text = document.sentences[sentence].replace("|", "\\|")
    note = document.notes.get(sentence)
    return f"{text}<br>*Here:* {note}" if note else text


def _tests_cell(document: Document, sentence: str, tests: list[str]) -> str:
    own = document.tests.get(sentence, ())
    return "<br>".join(f"`{test}`{' °' if test in own else ''}" for test in dict.fromkeys(tests))


def _sentences_of(test: Callable[..., object], document: Document) -> list[str]:
    return [sentence for name, sentence in covered_sentences(test) if name == document.name]


def _all_suites() -> list[type]:
    return [suite for suites in SUITES.values() for suite in suites]
