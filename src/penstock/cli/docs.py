"""Writes the reference pages that come from the code: `python -m penstock.cli.docs docs/reference`, or `make docs`.

Pages are committed, so that they can be read where the code is; a test holds that they are current.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from penstock.errors import PenstockError, Recovery

_FOLLOWS: Mapping[Recovery, str] = {
    Recovery.RETRY: "Penstock backs off and tries again by itself, from the same position.",
    Recovery.OPERATOR: "Penstock stops, or stops the one table, and says what you can do.",
    Recovery.FATAL: "Penstock stops, because going on could harm data. Please report it.",
}


def errors_page() -> str:
    """The reference of error codes, in the order of the codes."""
    lines = [
        "# Error codes",
        "",
        "<!-- Generated from src/penstock/errors.py by `make docs`. -->",
        "",
        "Every error that Penstock raises on purpose starts with one of these codes, in logs, in status and in what Spark reports.",
        "Where there is a fix, the message ends with it.",
        "",
        "What follows an error depends on its kind:",
        "",
        "| kind | what follows |",
        "|---|---|",
        *(f"| {recovery.value} | {text} |" for recovery, text in _FOLLOWS.items()),
        "",
        "| code | error | kind | meaning |",
        "|---|---|---|---|",
        *(f"| `{kind.code}` | {kind.__name__} | {kind.recovery.value} | {_meaning(kind)} |" for kind in _sorted_errors()),
    ]
    return "\n".join(lines) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {"errors.md": errors_page}


def write_pages(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, render in PAGES.items():
        (folder / name).write_text(render(), encoding="utf-8")


def _sorted_errors() -> list[type[PenstockError]]:
    return sorted(_tree(PenstockError), key=lambda kind: kind.code)


def _tree(kind: type[PenstockError]) -> Iterator[type[PenstockError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


def _meaning(kind: type[PenstockError]) -> str:
    text = inspect.cleandoc(kind.__doc__ or "")
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
