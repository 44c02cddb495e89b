"""Minimised cases that once failed, kept as files that a test repeats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.fuzz.cases import FuzzCase
from tests.fuzz.judge import Finding, judge
from tests.fuzz.values import ValueCase, judge_values

Case = FuzzCase | ValueCase

DIRECTORY = Path(__file__).parent / "findings"


def judge_any(case: Case) -> bool:
    return judge(case) if isinstance(case, FuzzCase) else judge_values(case)


def save(name: str, case: Case, finding: Finding, directory: Path = DIRECTORY) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps({"found": str(finding), **_to_json(case)}, indent=2) + "\n", encoding="utf-8")
    return path


def _to_json(case: Case) -> dict[str, Any]:
    if isinstance(case, ValueCase):
        return {
            "reader": case.reader,
            "modifier": case.modifier,
            "texts": [None if text is None else text.hex() for text in case.texts],
        }
    return {
        "keys": {str(oid): list(names) for oid, names in case.keys.items()},
        "prefixes": sorted(case.prefixes),
        "cuts": list(case.cuts),
        "max_open_messages": case.max_open_messages,
        "old_rows": case.old_rows,
        "messages": [message.hex() for message in case.messages],
    }


def load(path: Path) -> Case:
    content = json.loads(path.read_text(encoding="utf-8"))
    if "reader" in content:
        texts = (None if text is None else bytes.fromhex(text) for text in content["texts"])
        return ValueCase(content["reader"], content["modifier"], tuple(texts))
    return FuzzCase(
        tuple(bytes.fromhex(message) for message in content["messages"]),
        {int(oid): tuple(names) for oid, names in content["keys"].items()},
        frozenset(content["prefixes"]),
        tuple(content["cuts"]),
        content["max_open_messages"],
        content.get("old_rows", False),
    )


def shrink(case: Case, finding: Finding) -> Case:
    """The same finding with fewer messages and calls, or fewer texts, by leaving out one range at a time."""
    for smaller in _smaller(case) if isinstance(case, FuzzCase) else _fewer(case):
        if _is_found(smaller, str(finding)):
            return shrink(smaller, finding)
    return case


def _smaller(case: FuzzCase) -> Iterator[Case]:
    for size in (16, 8, 4, 3, 2, 1):
        for at in range(len(case.messages) - size + 1):
            cuts = tuple(cut - min(size, max(0, cut - at)) for cut in case.cuts)
            yield replace(case, messages=case.messages[:at] + case.messages[at + size :], cuts=cuts)
    for at in range(len(case.cuts)):
        yield replace(case, cuts=case.cuts[:at] + case.cuts[at + 1 :])
    if case.prefixes:
        yield replace(case, prefixes=frozenset())
    if case.old_rows:
        yield replace(case, old_rows=False)


def _fewer(case: ValueCase) -> Iterator[Case]:
    for at in range(len(case.texts)):
        yield replace(case, texts=case.texts[:at] + case.texts[at + 1 :])


def _is_found(case: Case, text: str) -> bool:
    try:
        judge_any(case)
    except Finding as again:
        return str(again) == text
    return False
