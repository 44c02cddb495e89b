"""A spool whose writer or retention dies between any two steps reads as before or as after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock import storage
from penstock.change import Idle, LogStep
from penstock.spool import SpoolReader, SpoolWriter, release
from tests.support.spool.builders import (
    ITEMS,
    ORDERS,
    Commit,
    all_changes,
    at,
    capture,
    changes,
    committed,
    delete_released,
    piece,
    transactions,
)

STEPS = (
    "ensure_directory",
    "open_new",
    "write",
    "rename",
    "delete",
    "delete_tree",
    "sync_file",
    "sync_directory",
)
LONG = [("orders", 30, 0), ("items", 30, 1), ("orders", 30, 2)]
LOG: tuple[tuple[LogStep, ...], ...] = (
    (transactions(Commit(10, (ORDERS, ITEMS)), Commit(20)),),
    (piece(7, (ORDERS, 0), (ITEMS, 1)), transactions(Commit(25)), piece(7, (ORDERS, 2)), committed(7, 30)),
    (Idle(at(40)),),
    (transactions(Commit(50, (ITEMS,))),),
)
POSSIBLE = {
    0: Counter[Any](),
    20: Counter([*Commit(10, (ORDERS, ITEMS)).seen(), *Commit(20).seen()]),
}
POSSIBLE[25] = POSSIBLE[20] + Counter(Commit(25).seen())
POSSIBLE[30] = POSSIBLE[25] + Counter(LONG)
POSSIBLE[40] = POSSIBLE[30]
POSSIBLE[50] = POSSIBLE[40] + Counter(Commit(50, (ITEMS,)).seen())


class PowerCut(BaseException):
    """Not an `Exception`, so that no handler catches it and cleans up."""


class Fuse:
    """Lets a number of storage steps succeed; the next one is half done, or not done, and raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
        self.left = steps
        for name in STEPS:
            monkeypatch.setattr(storage, name, self._guard(name, getattr(storage, name)))

    def _guard(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                if name == "write" and self.left == -1:
                    arguments[0].write_bytes(arguments[1][: len(arguments[1]) // 2])
                raise PowerCut
            return real(*arguments, **options)

        return step


def _write(root: Path, start: int) -> None:
    """Capture the log from `start` on, as a capture would after a restart."""
    writer = SpoolWriter(root, at(start), piece_buffer_bytes=0)
    for steps in LOG:
        for step in steps:
            if not isinstance(step, Idle) and getattr(step, "end", at(1000)) <= at(start):
                continue
            if getattr(step, "xid", None) == 7 and start >= 30:
                continue
            writer.append(step)
        writer.seal(quiet=True)


def _steps_of(action: Callable[[], None]) -> int:
    with pytest.MonkeyPatch.context() as patched:
        fuse = Fuse(patched, 1_000_000)
        action()
        return 1_000_000 - fuse.left


def _cut(action: Callable[[], None], after: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        Fuse(patched, after)
        with suppress(PowerCut):
            action()


def _end(root: Path) -> int:
    end = SpoolReader(root).end
    return 0 if end is None else end.value


def test_a_crash_at_any_step_of_writing_leaves_whole_segments_and_the_rest_is_captured_again(
    tmp_path: Path,
) -> None:
    steps = _steps_of(lambda: _write(tmp_path / "whole", 0))
    assert steps > 40
    seen_ends = set()
    for after in range(steps):
        root = tmp_path / str(after)
        _cut(lambda root=root: _write(root, 0), after)  # type: ignore[misc]
        end = _end(root)
        seen_ends.add(end)
        assert all_changes(root) == POSSIBLE[end], after
        _write(root, end)
        assert _end(root) == 50
        assert all_changes(root) == POSSIBLE[50], after
    assert seen_ends == set(POSSIBLE)


def test_a_crash_at_any_step_of_cleaning_up_after_a_crash_harms_nothing(tmp_path: Path) -> None:
    def prepare(root: Path) -> None:
        capture(root, 0, [[Commit(10)]])
        half = root / "segments" / f"{20:016X}"
        half.mkdir()
        (half / "half.parquet").write_bytes(b"PAR1")
        (root / "open" / "7").mkdir(parents=True)

    prepare(tmp_path / "whole")
    for after in range(_steps_of(lambda: SpoolWriter(tmp_path / "whole", at(10)).close())):
        root = tmp_path / str(after)
        prepare(root)
        _cut(lambda root=root: SpoolWriter(root, at(10)).close(), after)  # type: ignore[misc]
        assert all_changes(root) == Counter(Commit(10).seen())


def test_a_crash_at_any_step_of_deleting_leaves_segments_whole_or_gone_and_the_next_writer_finishes(
    tmp_path: Path,
) -> None:
    def prepare(root: Path) -> None:
        capture(root, 0, [[Commit(10, (ORDERS, ITEMS))], [Commit(20)], [Commit(30)]])
        release(root, "one", at(20))

    def delete(root: Path) -> None:
        delete_released(root)

    prepare(tmp_path / "whole")
    steps = _steps_of(lambda: delete(tmp_path / "whole"))
    assert steps >= 6
    for after in range(steps):
        root = tmp_path / str(after)
        prepare(root)
        _cut(lambda root=root: delete(root), after)  # type: ignore[misc]
        reader = SpoolReader(root)
        assert changes(reader.read(at(20), at(30))) == {"orders": [("orders", 30, 0)]}
        for segment in reader.segments():
            assert changes(reader.read(segment.start, segment.end))
        SpoolWriter(root, at(30)).close()
        delete(root)
        assert [path.name for path in (root / "segments").iterdir()] == [f"{30:016X}"], after


def test_a_reader_never_sees_a_segment_before_its_files_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    for name in ("sync_file", "sync_directory", "write", "append", "rename"):
        real = getattr(storage, name)

        def step(
            path: Path, *rest: Any, name: str = name, real: Callable[..., Any] = real, **options: Any
        ) -> Any:
            calls.append((name, path.suffix or path.name))
            return real(path, *rest, **options)

        monkeypatch.setattr(storage, name, step)
    writer = SpoolWriter(tmp_path, at(0))
    calls.clear()
    writer.append(transactions(Commit(10, (ORDERS, ORDERS))))
    writer.seal()
    assert calls == [
        ("write", ".tmp"),
        ("rename", ".tmp"),
        ("sync_directory", tmp_path.name),
        *_sealing(10, files=1),
    ]
    calls.clear()
    writer.append(transactions(Commit(20, (ORDERS, ITEMS))))
    writer.seal()
    assert calls == [("append", ".jsonl"), *_sealing(20)]
    calls.clear()
    writer.append(transactions(Commit(30, (ORDERS, ITEMS))))
    writer.seal()
    assert calls == _sealing(30), "tables whose shape is known cost nothing more"


def _sealing(end: int, *, files: int = 2) -> list[tuple[str, str]]:
    directory = f"{end:016X}"
    return [
        *[("sync_file", ".parquet")] * files,
        ("write", ".tmp"),
        ("sync_directory", directory),
        ("rename", ".tmp"),
        ("sync_directory", directory),
        ("sync_directory", "segments"),
    ]
