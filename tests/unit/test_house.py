"""Rules of the house that no other tool holds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import errors

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
MAX_LINES = 500
VAGUE_NAMES = frozenset({"utils", "util", "common", "helpers", "helper", "core", "manager", "misc"})
PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!]+")


def modules() -> Iterator[Path]:
    yield from sorted(SOURCE.rglob("*.py"))


def test_no_module_is_longer_than_one_can_take_in() -> None:
    lengths = {str(path.relative_to(SOURCE)): _line_count(path) for path in modules()}
    assert {name: count for name, count in lengths.items() if count > MAX_LINES} == {}


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [path for path in modules() if VAGUE_NAMES & {*path.parent.relative_to(SOURCE).parts, path.stem}] == []


def test_every_package_has_an_init_and_is_typed() -> None:
    packages = {path.parent for path in modules() if path.parent != SOURCE}
    assert {folder for folder in packages if not (folder / "__init__.py").exists()} == set()
    assert (SOURCE / "penstock" / "py.typed").exists()


def test_the_whole_error_tree_is_in_one_module() -> None:
    tree = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.PenstockError)}
    strays = [
        f"{path.relative_to(SOURCE)}: {node.name}"
        for path in modules()
        if path.name != "errors.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and tree & {base.id for base in node.bases if isinstance(base, ast.Name)}
    ]
    assert strays == []


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-spark42.txt"])
def test_constraints_are_exact_and_name_no_package_twice(name: str) -> None:
    lines = [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not PINNED.fullmatch(line)] == []
    packages = [line.partition("==")[0].lower().replace("_", "-") for line in lines]
    assert len(packages) == len(set(packages))


def _line_count(path: Path) -> int:
    return sum(1 for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
