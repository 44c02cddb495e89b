"""Every sentence of the documents has a test, and what is said of tests is true."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from penstock.cli.contracts_page import SUITES, contracts_page, unheld
from penstock.testing.rules import DOCUMENTS, held_by, holders_of, load_document, rule, suite_tests

TESTS = Path(__file__).parents[1]
HELD = [name for name in DOCUMENTS if name in SUITES]


@pytest.mark.parametrize("name", HELD)
def test_every_sentence_of_a_document_is_held_by_a_test(name: str) -> None:
    document = load_document(name)
    assert {sentence: document.sentences[sentence] for sentence in unheld(document)} == {}


@pytest.mark.xfail(reason="the suites of connectors and of reference tables are not here yet", strict=True)
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


def test_every_suite_is_run_against_an_implementation() -> None:
    run = {
        base.id
        for path in sorted((TESTS / "contract").glob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test")
        for base in node.bases
        if isinstance(base, ast.Name)
    }
    assert {suite.__name__ for suites in SUITES.values() for suite in suites} - run == set()


def test_sentence_without_a_test_is_found() -> None:
    document = load_document("record_source")
    assert [sentence for sentence, tests in holders_of(document, []).items() if not tests]


def test_rule_is_noted_on_the_test_and_misspelt_ones_are_refused() -> None:
    @rule("change_capture", "live()", "acks")
    @rule("record_source", "read-next")
    def test_something() -> None: ...

    assert held_by(test_something) == (("change_capture", "live()"), ("change_capture", "acks"), ("record_source", "read-next"))
    with pytest.raises(LookupError, match="no-such-sentence"):
        rule("change_capture", "no-such-sentence")
    with pytest.raises(LookupError):
        rule("change_capture")


def test_every_test_of_every_suite_is_on_the_page() -> None:
    page = contracts_page()
    names = [test.__name__ for suites in SUITES.values() for suite in suites for test in suite_tests(suite)]
    assert [name for name in names if f"`{name}`" not in page] == []
