"""Links, names and examples of the documentation are correct."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.config.model import load_config
from penstock.schema import TableName
from penstock.spark.datasource import FORMAT
from penstock.spark.java import DELTA_VERSION

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_configuration_shown_is_valid(tmp_path: Path) -> None:
    (block,) = _blocks("yaml")
    (tmp_path / "shop.yaml").write_text(block, encoding="utf-8")
    config = load_config(tmp_path / "shop.yaml")
    assert config.selects(TableName("public", "orders"))
    assert not config.selects(TableName("public", "tmp_x"))


def test_every_command_shown_exists() -> None:
    commands = set(re.findall(r"^\$ penstock ([\w-]+)", "\n".join(_blocks("console")), re.MULTILINE))
    assert commands
    for command in commands:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
    targets = set(re.findall(r"\bmake (\w+)", README))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def _options(group: Any, before: str) -> Iterator[tuple[str, set[str]]]:
    """Every command below `group`, with its own options."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _options(command, f"{before} {name}")
        else:
            yield (
                f"{before} {name}",
                {option for each in command.params for option in each.opts if option.startswith("--")},
            )


def test_reference_of_commands_has_every_command_with_its_options_and_no_other() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(penstock [a-z -]*[a-z])([^|]*)", page, re.MULTILINE)
    shown = {command: set(re.findall(r"--\w+", rest)) for command, rest in rows}
    assert shown == dict(_options(get_command(app), "penstock"))


def test_the_format_shown_is_the_one_that_is_registered() -> None:
    (block,) = _blocks("python")
    assert f'format("{FORMAT}")' in block


def test_examples_of_the_cluster_guide_are_valid(tmp_path: Path) -> None:
    """Its program and its command are run by the test of a cluster."""
    guide = (ROOT / "docs" / "guides" / "running-on-a-cluster.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "shop.yaml").write_text(block, encoding="utf-8")
    assert load_config(tmp_path / "shop.yaml").spark.master == "spark://master.example:7077"
    assert f"--packages io.delta:delta-spark_4.1_2.13:{DELTA_VERSION} " in guide


def _anchors(page: Path) -> set[str]:
    """The anchors that a Markdown viewer gives to the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in _anchors(linked), f"{page.name} links to {target}#{anchor}"


def test_index_of_the_documentation_lists_every_page() -> None:
    docs = ROOT / "docs"
    linked = set(re.findall(r"\]\(([^)#:]+)", (docs / "README.md").read_text(encoding="utf-8")))
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md") if page.parent.name != "decisions"}
    assert pages - {"README.md"} <= linked


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_every_file_and_test_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)", text)):
        places = [ROOT / name, *(ROOT / "src" / "penstock").rglob(name)]
        assert any(path.exists() for path in places), name
    for name in set(re.findall(r"`(tests/[\w/]+\.py)", text)):
        assert (ROOT / name).exists(), name
    suites = ROOT / "src" / "penstock" / "testing"
    tests = [
        path.read_text(encoding="utf-8") for place in (ROOT / "tests", suites) for path in place.rglob("*.py")
    ]
    for name in set(re.findall(r"`(test_\w+)`", text)):
        assert any(f"def {name}(" in text for text in tests), name
    code = [
        path.read_text(encoding="utf-8") for area in ("src", "tools") for path in (ROOT / area).rglob("*.py")
    ]
    for name in set(re.findall(r"`(_\w+|[A-Z]\w+\.[a-z_]\w*)`", text)):
        attribute = name.partition(".")[2] or name
        assert any(re.search(rf"\b{attribute}\b", text) for text in code), name


def test_configurations_in_the_guide_to_captures_are_valid(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guides" / "captures.md").read_text(encoding="utf-8")
    _, polling, shared = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "shop.yaml").write_text(polling, encoding="utf-8")
    rules = load_config(tmp_path / "shop.yaml").polling_rules
    assert rules is not None
    assert [rules.cursor_of(TableName("public", name)) for name in ("orders", "countries")] == [
        "updated_at",
        "xmin",
    ]
    (tmp_path / "shop_iceberg.yaml").write_text(shared, encoding="utf-8")
    assert load_config(tmp_path / "shop_iceberg.yaml").source.process == "separate"


def test_examples_of_the_quickstart_are_valid(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "shop.yaml").write_text(block, encoding="utf-8")
    config = load_config(tmp_path / "shop.yaml")
    assert config.selects(TableName("public", "orders"))
    assert config.sink.delta is not None
    assert f'"io.delta:delta-spark_4.1_2.13:{DELTA_VERSION}"' in page
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for program in programs:
        compile(program, "quickstart.md", "exec")
    commands = set(re.findall(r"^\$ penstock ([a-z][\w-]*)", page, re.MULTILINE))
    assert commands == {"check", "run", "status", "verify", "drop"}
    for command in commands:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
