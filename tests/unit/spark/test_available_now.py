"""When catching up is finished, on a Spark that has to be asked repeatedly."""

from __future__ import annotations

import pytest

from penstock.spark.request import _has_moved

OURS = {"startOffset": {"position": "0/10"}, "endOffset": {"position": "0/20"}}
IDLE = {"startOffset": {"position": "0/20"}, "endOffset": {"position": "0/20"}}
FIRST = {"startOffset": None, "endOffset": {"position": "0/20", "begins": "now"}}
RESTLESS = {"startOffset": 5, "endOffset": 6}
QUIET = {"startOffset": {"topic": {"0": 1}}, "endOffset": {"topic": {"0": 1}}}


@pytest.mark.parametrize(
    ("sources", "has_moved"),
    [
        ([OURS], True),
        ([IDLE], False),
        ([FIRST], True),
        ([QUIET, OURS], True),
        ([IDLE, OURS], True),
        ([RESTLESS, IDLE], False),
    ],
)
def test_batch_counts_if_any_of_our_sources_has_moved(sources: list[object], has_moved: bool) -> None:
    assert _has_moved({"sources": sources}) == has_moved
