from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from penstock.config.model import load_config
from tools.reference_pages import PAGES, write_pages

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = DOCS / "reference"
GUIDES = DOCS / "guides"


@pytest.mark.parametrize("name", sorted(PAGES))
def test_committed_reference_page_equals_the_generated_one(name: str) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


def test_pages_are_written_to_the_given_directory(tmp_path: Path) -> None:
    write_pages(tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == set(PAGES)


@pytest.mark.parametrize("page", sorted(GUIDES.glob("*.md")), ids=lambda page: page.stem)
def test_every_yaml_block_of_a_guide_is_a_configuration_or_a_part_of_one(page: Path, tmp_path: Path) -> None:
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        shown = yaml.safe_load(block)
        source = {"dsn": "dbname=shop", **shown.pop("source", {})}
        whole = {
            "pipeline": "shop",
            "source": source,
            "tables": ["public.orders"],
            "sink": {"delta": {"path": "lake"}},
            **shown,
        }
        (tmp_path / "shop.yaml").write_text(yaml.safe_dump(whole), encoding="utf-8")
        load_config(tmp_path / "shop.yaml")
