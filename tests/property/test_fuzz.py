"""A short run of the fuzzing that `make fuzz` does at length, and every saved finding."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import pytest

from penstock.postgres.pgoutput.decoder import PgOutputDecoder
from tests.fuzz.cases import FuzzCase, Lot
from tests.fuzz.findings import DIRECTORY, judge_any, load, save, shrink
from tests.fuzz.judge import Finding, judge
from tests.fuzz.lots import LOTS
from tests.support.pgoutput_streams import StreamWriter
from tests.support.rounds import FACTOR


@pytest.mark.parametrize(("subject", "seconds"), [("streams", 3.0), ("values", 1.5)])
def test_damaged_input_is_refused_or_read_as_it_should(subject: str, seconds: float) -> None:
    """New cases every day; a failure names the case, to be repeated with `python -m tests.fuzz --case`."""
    number = datetime.now(UTC).toordinal()
    lot = LOTS[subject](number)
    end = time.monotonic() + seconds * FACTOR
    outcomes = {True: 0, False: 0}
    for index in count():
        if time.monotonic() > end:
            break
        try:
            outcomes[judge_any(lot.case(index))] += 1
        except Finding as finding:
            pytest.fail(f"case {subject}:{number}:{index}: {finding}")
    # Neither all sound nor all broken beyond reading.
    assert min(outcomes.values()) > sum(outcomes.values()) / 10


def test_saved_fuzzing_findings_stay_fixed() -> None:
    found = {path.name: _finding(path) for path in DIRECTORY.glob("*.json")}
    assert found, "no saved findings exist"
    assert {name: finding for name, finding in found.items() if finding is not None} == {}


def _finding(path: Path) -> str | None:
    try:
        judge_any(load(path))
    except Finding as finding:
        return str(finding)
    return None


def test_a_case_is_the_same_whenever_it_is_run() -> None:
    assert [Lot(7).case(index) for index in range(20)] == [Lot(7).case(index) for index in range(20)]


def test_a_decoder_that_loses_a_row_is_found_and_the_case_made_small(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    writer = StreamWriter.start(3, 2)
    for _ in range(4):
        writer.transaction(8)
    case = FuzzCase(tuple(writer.messages), writer.keys)
    assert judge(case)
    monkeypatch.setattr(PgOutputDecoder, "decode", _without_the_last_step(PgOutputDecoder.decode))
    with pytest.raises(Finding, match="other rows than the oracle") as caught:
        judge(case)
    small = shrink(case, caught.value)
    assert isinstance(small, FuzzCase)
    assert len(small.messages) <= 6
    assert load(save("lost-row", small, caught.value, tmp_path)) == small


def _without_the_last_step(decode):  # type: ignore[no-untyped-def]
    return lambda decoder, messages: decode(decoder, messages)[:-1]
