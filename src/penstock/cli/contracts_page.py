"""The reference of contracts: which test holds which sentence, from the documents and the suites themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.testing.capture_conformance import ChangeCaptureConformance
from penstock.testing.connector_conformance import SourceConnectorConformance
from penstock.testing.provisioning_conformance import CaptureProvisioningConformance
from penstock.testing.record_source_conformance import RecordSourceConformance
from penstock.testing.records_conformance import CdcIteratorConformance, SnapshotterConformance
from penstock.testing.reference_conformance import ReferenceTableConformance
from penstock.testing.rules import DOCUMENTS, Document, held_by, holders_of, load_document, suite_tests

SUITES: Mapping[str, tuple[type, ...]] = {
    "change_capture": (ChangeCaptureConformance,),
    "wal_change_capture": (CaptureProvisioningConformance,),
    "source_connector": (SourceConnectorConformance,),
    "reference_table_source": (ReferenceTableConformance,),
    "record_source": (RecordSourceConformance, SnapshotterConformance, CdcIteratorConformance),
    "mistakes": (),
}
"""The suites of each document. A test may hold sentences of other documents too."""

_INTRO = """\
# Contracts

<!-- Generated from src/penstock/testing by `make docs`. -->

What Penstock promises to Python programs stands in `penstock.contracts`, in the docstrings. The contracts follow documents of other
projects; this page has every method and every sentence of those that says something, and the tests that hold it. Most are tests of the
suites in `penstock.testing`, which run against every implementation of ours and can be run against yours; those marked with ° are tests
of our implementation.
"""


def contracts_page() -> str:
    """One section for each document that has suites."""
    documents = [load_document(name) for name in DOCUMENTS if name in SUITES]
    return "\n".join([_INTRO, *(line for document in documents for line in _section(document))])


def unheld(document: Document) -> list[str]:
    """The sentences that no test holds."""
    return [sentence for sentence, tests in holders_of(document, _all_suites()).items() if not tests]


def _section(document: Document) -> Iterator[str]:
    own = SUITES[document.name]
    yield f"## {document.title}"
    yield ""
    yield f"From {document.origin}.{_where(document, own)}"
    yield ""
    yield f"| {document.column} | held by |"
    yield "|---|---|"
    for sentence, tests in holders_of(document, _all_suites()).items():
        yield f"| {_says(document, sentence)} | {_tests(document, sentence, tests)} |"
    loose = [test.__name__ for suite in own for test in suite_tests(suite) if not held_by(test)]
    if loose:
        yield ""
        yield "Rules of our own, beyond the document:"
        yield ""
        yield from (f"- `{name}`" for name in loose)
    yield ""


def _where(document: Document, suites: tuple[type, ...]) -> str:
    if not suites:
        return ""
    return f" In Python: `{document.contract}`. Suites: {', '.join(f'`{_path(suite)}`' for suite in suites)}."


def _says(document: Document, sentence: str) -> str:
    text = document.sentences[sentence].replace("|", "\\|")
    note = document.notes.get(sentence)
    return f"{text}<br>*Here:* {note}" if note else text


def _tests(document: Document, sentence: str, tests: list[str]) -> str:
    outside = document.tests.get(sentence, ())
    return "<br>".join(f"`{test}`{' °' if test in outside else ''}" for test in dict.fromkeys(tests))


def _all_suites() -> list[type]:
    return [suite for suites in SUITES.values() for suite in suites]


def _path(suite: type) -> str:
    return f"{suite.__module__}.{suite.__name__}"
