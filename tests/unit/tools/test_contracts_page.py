"""Every sentence of the contract documents is covered by a test, and every named test exists."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from penstock.testing.rules import covered_sentences, rule, suite_tests
from tools.contracts_page import SUITES, contracts_page, covering_tests, load_document, uncovered

TESTS = Path(__file__).parents[2]
ROOT = TESTS.parent


@pytest.mark.parametrize("name", SUITES)
def test_every_sentence_of_a_document_is_covered_by_a_test(name: str) -> None:
    document = load_document(name)
    assert {sentence: document.sentences[sentence] for sentence in uncovered(document)} == {}


def test_every_document_has_its_suites() -> None:
    assert sorted(SUITES) == sorted(path.stem for path in (ROOT / "tools" / "contract_documents").iterdir())


@pytest.mark.parametrize("name", SUITES)
def test_notes_and_tests_name_sentences_of_their_document(name: str) -> None:
    document = load_document(name)
    assert [
        sentence for sentence in (*document.notes, *document.tests) if sentence not in document.sentences
    ] == []


def test_tests_outside_the_suites_exist() -> None:
    defined = {
        node.name
        for path in sorted(TESTS.rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    named = {test for name in SUITES for tests in load_document(name).tests.values() for test in tests}
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
"""Every implementation of a contract, ours and those of the examples, with the classes in which the suites
run against it.
"""

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
    product = [
        path
        for path in (ROOT / "src" / "penstock").rglob("*.py")
        if path.parent.name not in ("contracts", "testing")
    ]
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
    assert {suite.__name__ for suites in SUITES.values() for suite in suites} - {
        suite for _, suite in implemented
    } == set()


def classes_in(paths: Iterable[Path]) -> Iterator[tuple[str, list[str]]]:
    """Name and bases of every class."""
    for path in sorted(paths):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                yield node.name, [base.id for base in node.bases if isinstance(base, ast.Name)]


def test_sentence_without_a_test_is_found() -> None:
    document = load_document("record_source")
    assert [sentence for sentence, tests in covering_tests(document, []).items() if not tests]


def test_rule_marks_a_test_and_misspelt_sentences_are_refused() -> None:
    class Suite:
        @rule("change_capture", "live()", "acks")
        @rule("record_source", "read-next")
        def test_something(self) -> None: ...

        @rule("mistakes", "no-such-sentence")
        def test_misspelt(self) -> None: ...

    expected = (("change_capture", "live()"), ("change_capture", "acks"), ("record_source", "read-next"))
    assert covered_sentences(Suite.test_something) == expected
    assert covering_tests(load_document("record_source"), [Suite])["read-next"][0] == "test_something"
    with pytest.raises(LookupError, match="no-such-sentence"):
        covering_tests(load_document("mistakes"), [Suite])
    with pytest.raises(LookupError):
        rule("change_capture")


def test_every_rule_names_a_document() -> None:
    tests = [test for suites in SUITES.values() for suite in suites for test in suite_tests(suite)]
    assert {document for test in tests for document, _ in covered_sentences(test)} - set(SUITES) == set()


def test_every_test_of_every_suite_is_on_the_page() -> None:
    page = contracts_page()
    names = [test.__name__ for suites in SUITES.values() for suite in suites for test in suite_tests(suite)]
    assert [name for name in names if f"`{name}`" not in page] == []
