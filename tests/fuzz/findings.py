"""Cases that have found something: made small, and kept as files that a unit test judges for ever."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.fuzz.cases import FuzzCase
from tests.fuzz.judge import Finding, judge

DIRECTORY = Path(__file__).parent / "findings"


def save(name: str, case: FuzzCase, finding: Finding, directory: Path = DIRECTORY) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}.json"
    content = {
        "found": str(finding),
        "keys": {str(oid): list(names) for oid, names in case.keys.items()},
        "prefixes": sorted(case.prefixes),
        "cuts": list(case.cuts),
        "max_open_messages": case.max_open_messages,
        "messages": [message.hex() for message in case.messages],
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def load(path: Path) -> FuzzCase:
    content = json.loads(path.read_text(encoding="utf-8"))
    return FuzzCase(
        tuple(bytes.fromhex(message) for message in content["messages"]),
        {int(oid): tuple(names) for oid, names in content["keys"].items()},
        frozenset(content["prefixes"]),
        tuple(content["cuts"]),
        content["max_open_messages"],
    )


def shrink(case: FuzzCase, finding: Finding) -> FuzzCase:
    """The same finding with fewer messages and calls, as far as leaving out one stretch at a time goes."""
    for smaller in _smaller(case):
        if _is_found(smaller, str(finding)):
            return shrink(smaller, finding)
    return case


def _smaller(case: FuzzCase) -> Iterator[FuzzCase]:
    for size in (16, 8, 4, 3, 2, 1):
        for at in range(len(case.messages) - size + 1):
            cuts = tuple(cut - min(size, max(0, cut - at)) for cut in case.cuts)
            yield replace(case, messages=case.messages[:at] + case.messages[at + size :], cuts=cuts)
    for at in range(len(case.cuts)):
        yield replace(case, cuts=case.cuts[:at] + case.cuts[at + 1 :])
    if case.prefixes:
        yield replace(case, prefixes=frozenset())


def _is_found(case: FuzzCase, text: str) -> bool:
    try:
        judge(case)
    except Finding as again:
        return str(again) == text
    return False
