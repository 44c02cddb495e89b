"""`penstock_epochs`: the log of epochs, stored next to the target tables.

A row says that every streaming table has all changes up to the row's position. The last row has the
pipeline's recorded position. Each row is written to a small JSON file that is renamed into place. When there
are 256 such files, they are merged into one. Maintenance deletes rows that are older than the retention.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock import storage
from penstock.errors import SinkError, SpoolCorruptError
from penstock.pipeline.retries import check_format
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.position import Position
from penstock.schema import TableName
from penstock.sinks.base import EPOCHS

FORMAT = 1
_FOLD_FILES = 256
_HOLD_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Epoch:
    """One row of the log: the states of all tables at one position. `tables` has every table of the pipeline,
    whether or not it changed.
    """

    number: int
    position: Position
    commit_time: datetime | None
    system: str
    """System identifier and timeline of the source."""
    tables: Mapping[TableName, TableStatus] = field(default_factory=dict)


class EpochLog:
    """The directory `<target root>/penstock_epochs/<pipeline>`. Only the running pipeline writes it."""

    def __init__(self, root: Path, pipeline: str) -> None:
        self._root = root
        self._directory = root / EPOCHS / pipeline

    def last(self) -> Epoch | None:
        """Return the newest row; None if the log is empty."""
        while True:
            newest = [
                max(storage.list_paths(self._directory, pattern), default=None)
                for pattern in ("*.json", "*.jsonl")
            ]
            with suppress(FileNotFoundError):  # a merge removed the file: read again
                rows = (row for path in newest if path is not None for row in _rows(path))
                return max(rows, key=lambda epoch: epoch.position, default=None)

    def at(self, position: Position) -> Epoch | None:
        """Return the row of exactly this position; None if no epoch has ended there."""
        name = f"{position.value:016X}"
        # Read the small file first, because it is removed only after its row is in a merged file. A merged
        # file has the name of its last row.
        with suppress(FileNotFoundError):
            return next(_rows(self._directory / f"{name}.json"))
        folded = min(
            (path for path in storage.list_paths(self._directory, "*.jsonl") if path.stem >= name),
            default=None,
        )
        return (
            None if folded is None else next((row for row in _rows(folded) if row.position == position), None)
        )

    def newest(self, wanted: Callable[[Epoch], bool]) -> Epoch | None:
        """Return the newest row for which `wanted` is true; None if no row is found. Reads all rows in the
        worst case.
        """
        while True:
            # Newest first, by the last row of each file. During a merge, a row is in one or two files.
            paths = sorted(
                [
                    *storage.list_paths(self._directory, "*.json"),
                    *storage.list_paths(self._directory, "*.jsonl"),
                ],
                key=lambda path: path.stem,
                reverse=True,
            )
            with suppress(FileNotFoundError):
                return next(
                    (row for path in paths for row in reversed(list(_rows(path))) if wanted(row)), None
                )

    def record(self, epoch: Epoch) -> None:
        """Write the row durably. Its position may be released only after this."""
        if not storage.is_directory(self._root):
            raise SinkError(f"the target directory {self._root} does not exist; is its volume mounted?")
        try:
            self._put(self._directory / f"{epoch.position.value:016X}.json", [_document(epoch)])
            files = storage.list_paths(self._directory, "*.json")
            if len(files) >= _FOLD_FILES:
                self._fold(files)
        except OSError as error:
            hint = (
                f"free space in {self._directory}, or fix the reported problem; the pipeline then "
                "continues by itself"
            )
            raise SinkError(
                f"the epoch record cannot be written: {error.strerror or type(error).__name__}", hint=hint
            ) from error

    def forget(self, keep_seconds: float, rows: int) -> None:
        """Delete merged files that are older than `keep_seconds`, or whose rows are not among the last
        `rows`. Keeps the newest merged file and all files of the last hour. May run in parallel with
        `record`.
        """
        files = storage.list_paths(self._directory, "*.jsonl")
        now = time.time()
        for after, path in enumerate(reversed(files)):
            age = now - storage.modified_seconds(path)
            is_beyond = after * _FOLD_FILES >= rows and age > _HOLD_SECONDS
            if after and (is_beyond or age > max(keep_seconds, _HOLD_SECONDS)):
                storage.delete(path)

    def _fold(self, files: list[Path]) -> None:
        """Merge small files into one, which never changes afterwards. Holds only one row in memory, because
        each row names every table.

        A crash leaves some rows twice, which does no harm.
        """
        self._put(files[-1].with_suffix(".jsonl"), (_document(row) for path in files for row in _rows(path)))
        for path in files:
            storage.delete(path)

    def _put(self, path: Path, documents: Iterable[dict[str, object]]) -> None:
        storage.put(path, (json.dumps(document).encode() + b"\n" for document in documents), shared=True)


def _rows(path: Path) -> Iterator[Epoch]:
    try:
        with storage.open_input(path) as lines:
            for line in lines:
                document = json.loads(line)
                check_format(document, FORMAT, path)
                yield _parse(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpoolCorruptError(
            f"{path} is not a valid epoch record", hint="restore the file from a backup of the target"
        ) from error


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
