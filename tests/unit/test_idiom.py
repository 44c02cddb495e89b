"""The count of sentences in the private idiom, `tools/idiom.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.idiom import main, measure

PLAIN = '"""Write one epoch to one table."""\n\n# The driver commits after all tasks have ended.\n'
MARKED = '"""Whoever asks first is told what there is."""\n'


def write(root: Path, *sources: str) -> Path:
    (root / "src").mkdir()
    for number, source in enumerate(sources):
        (root / "src" / f"module_{number}.py").write_text(source, encoding="utf-8")
    return root


def test_marked_sentences_are_counted_with_their_file(tmp_path: Path) -> None:
    area = measure(write(tmp_path, PLAIN, MARKED), "src")
    assert area.sentences == 3
    assert area.marked == (("src/module_1.py", "Whoever asks first is told what there is."),)
    assert round(area.share) == 33


@pytest.mark.parametrize(
    "source",
    [
        "raise ValueError('the table is copied anew')",
        "raise ValueError(f'{table} is copied anew')",
        "assert found, 'nobody asked for the table'",
        "log.info('it is put aside by then')",
        "# What is refused is put aside.",
    ],
)
def test_messages_and_comments_are_texts(source: str, tmp_path: Path) -> None:
    assert len(measure(write(tmp_path, source), "src").marked) == 1


@pytest.mark.parametrize(
    "source", ["name = 'nobody asked for the table'", "# copied anew", "# Is this what it is for?"]
)
def test_values_labels_and_questions_are_no_sentences(source: str, tmp_path: Path) -> None:
    assert measure(write(tmp_path, source), "src").marked == ()


@pytest.mark.parametrize(("limit", "status"), [("src=33", 1), ("src=34", 0), ("docs=0", 0)])
def test_exit_code_says_whether_an_area_is_above_its_limit(
    limit: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write(tmp_path, PLAIN, MARKED)), "--limit", limit]) == status
    assert ("ABOVE" in capsys.readouterr().out) == bool(status)
