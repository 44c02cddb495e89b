"""`penstock_epochs`: the record of what the targets hold, kept beside them.

One row for each epoch after which every streaming table holds all changes up to its position. The last row is the pipeline's position,
and the only thing that allows confirming. A row is a small JSON file renamed into place; now and then the files are folded into one, and
those that nobody can read tables at any more are forgotten.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.errors import SinkError, SpoolCorruptError
from penstock.pipeline.formats import check_format
from penstock.pipeline.states import TableState, TableStatus
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.directories import EPOCHS

FORMAT = 1
_FOLD_FILES = 256
_HOLD_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Epoch:
    """All tables as of one position. `tables` names every table of the pipeline, touched or not."""

    number: int
    position: Position
    commit_time: datetime | None
    system: str
    """Of the source: system identifier and timeline."""
    tables: Mapping[TableName, TableStatus] = field(default_factory=dict)


class EpochLog:
    """One directory of one pipeline, `<target root>/penstock_epochs/<pipeline>`. One writer: the pipeline that runs."""

    def __init__(self, root: Path, pipeline: str) -> None:
        self._root = root
        self._directory = root / EPOCHS / pipeline

    def last(self) -> Epoch | None:
        """The newest row; None if the pipeline never got so far."""
        while True:
            newest = [max(self._directory.glob(pattern), default=None) for pattern in ("*.json", "*.jsonl")]
            with suppress(FileNotFoundError):  # folded in this moment: look again
                rows = [row for path in newest if path is not None for row in _rows(path)]
                return max(rows, key=lambda epoch: epoch.position, default=None)

    def at(self, position: Position) -> Epoch | None:
        """The row of exactly this position; None if no epoch ended there, or none has yet."""
        name = f"{position.value:016X}"
        # In this order: a row is in the larger file, which has the name of its last one, before the small file goes.
        with suppress(FileNotFoundError):
            return next(_rows(self._directory / f"{name}.json"))
        folded = min((path for path in self._directory.glob("*.jsonl") if path.stem >= name), default=None)
        return None if folded is None else next((row for row in _rows(folded) if row.position == position), None)

    def newest(self, wanted: Callable[[Epoch], bool]) -> Epoch | None:
        """The newest row that is `wanted`; None if there is none. Reads all of them, at worst."""
        while True:
            # In the order of their last rows. A row may be in two files, never in none.
            paths = sorted([*self._directory.glob("*.json"), *self._directory.glob("*.jsonl")], key=lambda path: path.stem, reverse=True)
            with suppress(FileNotFoundError):
                return next((row for path in paths for row in reversed(list(_rows(path))) if wanted(row)), None)

    def record(self, epoch: Epoch) -> None:
        """Make the row durable. Only after this may its position be confirmed."""
        if not self._root.is_dir():
            raise SinkError(f"the target directory {self._root} does not exist; is its volume mounted?")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._put(self._directory / f"{epoch.position.value:016X}.json", [_document(epoch)])
            files = sorted(self._directory.glob("*.json"))
            if len(files) >= _FOLD_FILES:
                self._fold(files)
        except OSError as error:
            hint = f"make room, or mend what the message names, in {self._directory}; the pipeline then continues by itself"
            raise SinkError(f"the record of epochs cannot be written: {error.strerror or type(error).__name__}", hint=hint) from error

    def forget(self, keep_seconds: float, rows: int) -> None:
        """Rows older than that, or besides the last `rows`; never those of the last hour, nor the last ones of all. Beside `record`."""
        files = sorted(self._directory.glob("*.jsonl"))
        now = time.time()
        for after, path in enumerate(reversed(files)):
            age = now - path.stat().st_mtime
            is_beyond = after * _FOLD_FILES >= rows and age > _HOLD_SECONDS
            if after and (is_beyond or age > max(keep_seconds, _HOLD_SECONDS)):
                path.unlink(missing_ok=True)

    def _fold(self, files: list[Path]) -> None:
        """Small files into one that is never written again; a crash in between leaves some rows twice, which does no harm."""
        rows = [row for path in files for row in _rows(path)]
        self._put(files[-1].with_suffix(".jsonl"), [_document(row) for row in rows])
        for path in files:
            path.unlink()

    def _put(self, path: Path, documents: list[dict[str, object]]) -> None:
        temporary = path.with_suffix(path.suffix + ".tmp")
        with temporary.open("w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(document) + "\n" for document in documents)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(path)
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _rows(path: Path) -> Iterator[Epoch]:
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            document = json.loads(line)
            check_format(document, FORMAT, path)
            yield _parse(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpoolCorruptError(f"{path} is not a record of epochs", hint="restore the file from a backup of the target") from error


def _document(epoch: Epoch) -> dict[str, object]:
    return {
        "format": FORMAT,
        "epoch": epoch.number,
        "position": str(epoch.position),
        "commit_time": epoch.commit_time.isoformat() if epoch.commit_time else None,
        "system": epoch.system,
        "tables": {str(name): _table_document(status) for name, status in sorted(epoch.tables.items())},
    }


def _table_document(status: TableStatus) -> dict[str, object]:
    return {
        "state": status.state.value,
        "applied": _text(status.applied),
        "committed": _text(status.committed),
        "reason": status.reason,
        "remedy": status.remedy,
    }


def _parse(document: dict[str, Any]) -> Epoch:
    committed = document["commit_time"]
    return Epoch(
        document["epoch"],
        Position.parse(document["position"]),
        datetime.fromisoformat(committed) if committed else None,
        document["system"],
        {TableName.parse(name): _parse_table(each) for name, each in document["tables"].items()},
    )


def _parse_table(document: dict[str, Any]) -> TableStatus:
    return TableStatus(
        TableState(document["state"]),
        _position(document["applied"]),
        _position(document["committed"]),
        document["reason"],
        document["remedy"],
    )


def _text(position: Position | None) -> str | None:
    return str(position) if position is not None else None


def _position(text: str | None) -> Position | None:
    return Position.parse(text) if text is not None else None
