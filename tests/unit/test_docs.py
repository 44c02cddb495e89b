from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.docs import PAGES, write_pages

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", sorted(PAGES))
def test_committed_reference_page_is_what_the_code_says(name: str) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


def test_pages_are_written_where_asked(tmp_path: Path) -> None:
    write_pages(tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == set(PAGES)
