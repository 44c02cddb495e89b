"""Case codes in test names (T12, K05) refer to docs/reference/edge-cases.md."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "edge-cases.md").read_text(encoding="utf-8")
LISTED = re.findall(r"^\| ([A-Z]\d\d) \|", PAGE, re.MULTILINE)
SECTIONS = {code[0] for code in LISTED}
CODES = re.compile(r"test((?:(?:_to)?_[A-Za-z]\d\d)+)_")


def case_codes(name: str) -> set[str]:
    """Case codes at the beginning of a test name, in upper case.

    A lower-case letter counts only if it is a section of the page: `test_z85_…` is about the encoding Z85.
    """
    match = CODES.match(name)
    codes = re.findall(r"[A-Za-z]\d\d", match[1]) if match else []
    return {code.upper() for code in codes if code[0].isupper() or code[0].upper() in SECTIONS}


@cache
def codes_by_test() -> dict[str, set[str]]:
    """Every test function below tests/, with the codes in its name."""
    return {
        f"{path.relative_to(ROOT)}::{node.name}": case_codes(node.name)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("test_T12_dates", {"T12"}),
        ("test_k02_every_order", {"K02"}),
        ("test_K04_K05_toast", {"K04", "K05"}),
        ("test_S01_to_S06_a_table", {"S01", "S06"}),
        ("test_Q07_no_section", {"Q07"}),
        ("test_z85_is_an_encoding", set()),
        ("test_a_row_of_T12_is_not_a_code", set()),
    ],
)
def test_codes_are_found_in_a_test_name(name: str, codes: set[str]) -> None:
    assert case_codes(name) == codes


def test_every_code_in_a_test_name_is_listed() -> None:
    unlisted = {name: codes - set(LISTED) for name, codes in codes_by_test().items() if codes - set(LISTED)}
    assert unlisted == {}, "add the case to docs/reference/edge-cases.md, or correct the test name"


def test_codes_are_listed_once_and_without_gaps() -> None:
    assert len(LISTED) == len(set(LISTED))
    for section in SECTIONS:
        numbers = sorted(int(code[1:]) for code in LISTED if code[0] == section)
        assert numbers == list(range(1, len(numbers) + 1)), section
        assert f"{section}01–{section}{len(numbers):02d} |" in PAGE, f"the overview of section {section}"


def test_every_listed_case_has_a_test_or_names_its_modules() -> None:
    covered = {code for codes in codes_by_test().values() for code in codes}
    for code in sorted(set(LISTED) - covered):
        (row,) = re.findall(rf"^\| {code} \|.*$", PAGE, re.MULTILINE)
        assert "`tests/" in row or "No separate test" in row, f"{code} has no test"


def test_every_module_that_the_page_names_exists() -> None:
    modules = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
    assert modules
    assert [name for name in sorted(modules) if not (ROOT / name).exists()] == []
