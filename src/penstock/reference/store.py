"""Where a reference table is kept for executors to read: a directory that they and the driver reach.

```
reference.json            what is kept, how far it reaches, and which of the files below count
base-….parquet            the whole table, exact at the floor
changes-….parquet         what happened after it, in order
lock                      held by the one keeper
```

A file counts when `reference.json` names it, which is replaced in one step; so readers see one state of the table or the next, and never
half a transaction. Files that no longer count stay for a while, for those who have just read an older `reference.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from penstock.contracts.connector import SourceCheckpoint
from penstock.errors import CheckpointError, PenstockError, ReferenceStoreError
from penstock.spool import storage

FORMAT = 1
STATE = "reference.json"
LOCK = "lock"

_ANEW = "remove the directory, so that the table is copied anew, or name another one"


@dataclass(frozen=True, slots=True)
class ChangesFile:
    """Whole transactions of the versions after `after` and up to `upto`."""

    name: str
    after: int
    upto: int
    rows: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why nothing comes any more, for readers in other processes."""

    code: str
    message: str
    hint: str | None = None

    @classmethod
    def of(cls, error: PenstockError) -> Self:
        return cls(error.code, error.message, error.hint)

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclass(frozen=True, slots=True)
class StoreState:
    """All that `reference.json` says."""

    identity: str
    """Of this copy of the table. One that is made anew in the same directory is another."""
    key: tuple[str, ...]
    base: str
    base_rows: int
    floor: int
    reached: int
    """Everything up to this version is here."""
    checkpoint: SourceCheckpoint
    changes: tuple[ChangesFile, ...] = ()
    failure: Failure | None = field(default=None)

    @property
    def names(self) -> frozenset[str]:
        """Of the files that count."""
        return frozenset({self.base, *(each.name for each in self.changes)})

    @property
    def changes_rows(self) -> int:
        return sum(each.rows for each in self.changes)

    def with_changes(self, *added: ChangesFile, reached: int, checkpoint: SourceCheckpoint) -> StoreState:
        return replace(self, changes=(*self.changes, *added), reached=reached, checkpoint=checkpoint, failure=None)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self), "checkpoint": self.checkpoint.to_json()})

    @classmethod
    def parse(cls, text: str, where: Path) -> StoreState:
        try:
            document = json.loads(text)
            found = document.pop("format")
            if not isinstance(found, int) or found > FORMAT:
                raise ReferenceStoreError(
                    f"{where} has format {found}, and this version of penstock reads up to {FORMAT}", hint="run the version that wrote it"
                )
            return _parse(document)
        except (KeyError, TypeError, ValueError, CheckpointError) as error:
            raise ReferenceStoreError(f"{where} cannot be understood", hint=_ANEW) from error


def _parse(document: dict[str, Any]) -> StoreState:
    failure = document.pop("failure")
    return StoreState(
        key=tuple(document.pop("key")),
        checkpoint=SourceCheckpoint.from_json(document.pop("checkpoint")),
        changes=tuple(ChangesFile(**each) for each in document.pop("changes")),
        failure=Failure(**failure) if failure is not None else None,
        **document,
    )


def load_state(directory: Path) -> StoreState | None:
    """None if no table is kept there yet."""
    data = storage.read_bytes(directory / STATE)
    return StoreState.parse(data.decode(), directory / STATE) if data is not None else None


def store_state(directory: Path, state: StoreState) -> None:
    """From here on this is what counts, durably. Files that it names must be durable already."""
    storage.replace_bytes(directory / STATE, state.to_json().encode())


def remove_others(directory: Path, kept: Iterable[str]) -> None:
    """Remove every file of ours but these."""
    names = {*kept, STATE, LOCK}
    for name in storage.list_files(directory):
        if name not in names and name.startswith(("base-", "changes-", STATE)):
            storage.remove_file(directory / name)
