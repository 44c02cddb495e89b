"""Every sentence of the documents has a test, and what is said of tests is true."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from penstock.cli.contracts_page import SUITES, contracts_page, unheld
from penstock.testing.rules import DOCUMENTS, held_by, holders_of, load_document, rule, suite_tests

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
HELD = [name for name in DOCUMENTS if name in SUITES]


@pytest.mark.parametrize("name", HELD)
def test_every_sentence_of_a_document_is_held_by_a_test(name: str) -> None:
    document = load_document(name)
    assert {sentence: document.sentences[sentence] for sentence in unheld(document)} == {}


def test_every_document_has_its_suites() -> None:
    assert sorted(SUITES) == sorted(DOCUMENTS)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_notes_and_tests_are_about_sentences_that_are_there(name: str) -> None:
    document = load_document(name)
    assert [sentence for sentence in (*document.notes, *document.tests) if sentence not in document.sentences] == []


def test_tests_outside_the_suites_are_there() -> None:
    defined = {
        node.name
        for path in sorted(TESTS.rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    named = {test for name in DOCUMENTS for tests in load_document(name).tests.values() for test in tests}
    assert named - defined == set()


RUN_BY = {
    "ListCapture": ["TestListCapture"],
    "ListProvisioning": ["TestListProvisioning"],
    "WalCapture": ["TestWalCapture", "TestWalProvisioning"],
    "PollingCapture": ["TestPollingByXmin", "TestPollingByColumn"],
    "TriggerCapture": ["TestTriggerCapture", "TestTriggerProvisioning"],
    "ListConnector": ["TestListConnector"],
    "PostgresConnector": ["TestPostgresConnector"],
    "ListReference": ["TestListReference"],
    "ParquetReferenceTable": ["TestParquetReference"],
    "PostgresReferenceTable": ["TestPostgresReference"],
    "ListRecordSource": ["TestListRecordSource"],
    "PostgresRecordSource": ["TestPostgresRecordSource"],
    "ListSnapshotter": ["TestListSnapshotter"],
    "CaptureSnapshotter": ["TestPostgresSnapshotter"],
    "ListIterator": ["TestListIterator"],
    "RecordBuffer": ["TestRecordBuffer"],
}
"""Every implementation of a contract, ours and those of the examples, with the classes in which the suites are run against it."""

CONTRACTS = {
    "ChangeCapture": "ChangeCaptureConformance",
    "CaptureProvisioning": "CaptureProvisioningConformance",
    "SourceConnector": "SourceConnectorConformance",
    "ReferenceTableSource": "ReferenceTableConformance",
    "PositionedReferenceTable": "ReferenceTableConformance",
    "RecordSource": "RecordSourceConformance",
    "Snapshotter": "SnapshotterConformance",
    "CdcIterator": "CdcIteratorConformance",
}


def test_every_implementation_is_held_to_the_suite_of_its_contract() -> None:
    product = [path for path in (ROOT / "src" / "penstock").rglob("*.py") if path.parent.name not in ("contracts", "testing")]
    implemented = {
        (name, CONTRACTS[base])
        for name, bases in classes_in([*product, *(ROOT / "examples").glob("*.py")])
        for base in bases
        if base in CONTRACTS
    }
    run = dict(classes_in((TESTS / "contract").glob("test_*.py")))
    held = {(name, base) for name, tests in RUN_BY.items() for test in tests for base in run.get(test, ())}
    assert implemented - held == set()
    assert set(RUN_BY) - {name for name, _ in implemented} == set()
    assert {suite.__name__ for suites in SUITES.values() for suite in suites} - {suite for _, suite in implemented} == set()


def classes_in(paths: Iterable[Path]) -> Iterator[tuple[str, list[str]]]:
    """Name and bases of every class."""
    for path in sorted(paths):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                yield node.name, [base.id for base in node.bases if isinstance(base, ast.Name)]


def test_sentence_without_a_test_is_found() -> None:
    document = load_document("record_source")
    assert [sentence for sentence, tests in holders_of(document, []).items() if not tests]


def test_rule_is_noted_on_the_test_and_misspelt_ones_are_refused() -> None:
    @rule("change_capture", "live()", "acks")
    @rule("record_source", "read-next")
    def something() -> None: ...

    assert held_by(something) == (("change_capture", "live()"), ("change_capture", "acks"), ("record_source", "read-next"))
    with pytest.raises(LookupError, match="no-such-sentence"):
        rule("change_capture", "no-such-sentence")
    with pytest.raises(LookupError):
        rule("change_capture")


def test_every_test_of_every_suite_is_on_the_page() -> None:
    page = contracts_page()
    names = [test.__name__ for suites in SUITES.values() for suite in suites for test in suite_tests(suite)]
    assert [name for name in names if f"`{name}`" not in page] == []
