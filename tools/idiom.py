"""Count sentences that use the private idiom of earlier versions, by area.

    python -m tools.idiom --limit src=2 --limit tests=2 --show 20

Exits with 1 if the share of marked sentences in an area is above its limit (in percent). The markers are a
sample: a low share does not prove that the text is plain, a high share proves that it is not.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MIN_WORDS = 4
"""Shorter texts are labels, not sentences."""
AREAS = {
    "src": ("src/**/*.py",),
    "tests": ("tests/**/*.py",),
    "docs": ("docs/**/*.md",),
    "top": ("*.md",),
}
EXEMPT = frozenset(
    {"CHANGELOG.md", "docs/glossary.md", "tests/unit/test_house.py", "tests/unit/test_idiom.py"}
)
"""A record of the past, the list of former terms, and tests that list banned words."""

MARKERS = (
    # Pronouns in the place of the actor.
    r"\bwho(?:m|se)?ever\b",
    r"\b(?:no|some|every)body(?:'s)?\b",
    r"\bof (?:ours|theirs|its own|their own)\b",
    # Adverbs for "again", "at the same time", "until now", "permanently".
    r"\banew\b",
    r"\bmeanwhile\b",
    r"\bby then\b",
    r"\ball the while\b",
    r"\bfor (?:ever|good)\b",
    # Clauses without a noun: "what is refused is put aside".
    (
        r"(?:^|[.:;(,] )[Ww]hat "
        r"(?:is|was|are|were|has|had|can|cannot|could|may|must|would|do|does|did)\b(?!.*\?$)"
    ),
    (
        r"(?:^|[.:;(,] )[Ww]hat "
        r"(?:becomes|comes|goes|happens|keeps|makes|needs|else|only|no|one|a|an|the|it|they|there|we)\b(?!.*\?$)"
    ),
    r"\bhow (?:far|much|many) (?:it|they|that) (?:is|are|has|have)\b",
    # Verbs of place and motion for states.
    r"\b(?:stands?|stood|lies|lay) (?:in|on|at|there|beside|before|behind|between|where)\b",
    r"\b(?:that|which) (?:go|goes|went|come|comes|came)\b",
    r"\bcomes? to (?:the same|as much|what|less|nothing)\b",
    r"\b(?:is|are|was|were) (?:none|no more|not there|there already)\b",
    # Passives that hide the actor.
    r"\b(?:is|are|was|were) (?:told|asked|had|learned|looked at|put aside|let go|gone over|seen to)\b",
    r"\bcan(?:not)? be (?:told|had)\b",
    r"\bsaid (?:of|to be)\b",
)
MARKER = re.compile("|".join(MARKERS))
SENTENCE_END = re.compile(r"(?<=[.!?;:])\s+|\n\s*\n|\n\s*[-*|]")
CODE_BLOCK = re.compile(r"```.*?```", re.DOTALL)


@dataclass(frozen=True)
class Area:
    """The sentences of an area and those with a marker, each with its file."""

    name: str
    sentences: int
    marked: tuple[tuple[str, str], ...]

    @property
    def share(self) -> float:
        return 100 * len(self.marked) / self.sentences if self.sentences else 0.0


def is_marked(sentence: str) -> bool:
    return MARKER.search(sentence) is not None


def split_sentences(text: str) -> Iterator[str]:
    for part in SENTENCE_END.split(text):
        sentence = " ".join(part.split())
        if len(sentence.split(" ")) >= MIN_WORDS:
            yield sentence


def python_texts(source: str) -> Iterator[str]:
    """Comments, docstrings, and string arguments of calls: messages, hints, help texts."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr):
            yield from _strings(node.value)
        elif isinstance(node, ast.Call):
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                yield from _strings(argument)
        elif isinstance(node, ast.Assert) and node.msg is not None:
            yield from _strings(node.msg)


def _strings(node: ast.expr) -> Iterator[str]:
    """The text of a string or an f-string, with `{}` for each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)


def measure(root: Path, name: str) -> Area:
    count = 0
    marked: list[tuple[str, str]] = []
    for path in sorted({path for pattern in AREAS[name] for path in root.glob(pattern)}):
        relative = path.relative_to(root).as_posix()
        if relative in EXEMPT:
            continue
        text = path.read_text(encoding="utf-8")
        texts = python_texts(text) if path.suffix == ".py" else [CODE_BLOCK.sub("", text)]
        sentences = dict.fromkeys(sentence for part in texts for sentence in split_sentences(part))
        count += len(sentences)
        marked += [(relative, sentence) for sentence in sentences if is_marked(sentence)]
    return Area(name, count, tuple(marked))


def parse_limit(text: str) -> tuple[str, float]:
    name, _, percent = text.partition("=")
    if name not in AREAS:
        raise argparse.ArgumentTypeError(f"unknown area {name!r}, expected one of {', '.join(AREAS)}")
    try:
        return name, float(percent)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected AREA=PERCENT, not {text!r}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.idiom", description="Count sentences in the private idiom, by area."
    )
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    parser.add_argument(
        "--limit",
        action="append",
        type=parse_limit,
        default=[],
        metavar="AREA=PERCENT",
        help="largest share allowed",
    )
    parser.add_argument(
        "--show", type=int, default=0, metavar="N", help="print the first N marked sentences of each area"
    )
    chosen = parser.parse_args(arguments)
    limits = dict(chosen.limit)
    failed = False
    for name in AREAS:
        area = measure(chosen.root, name)
        limit = limits.get(name)
        is_above = limit is not None and area.share > limit
        failed = failed or is_above
        verdict = "" if limit is None else f"  limit {limit:g} %{': ABOVE' if is_above else ''}"
        print(
            f"{name:6} {area.sentences:6} sentences {len(area.marked):5} marked {area.share:6.2f} %{verdict}"
        )
        for path, sentence in area.marked[: chosen.show]:
            print(f"    {path}: {sentence[:160]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
