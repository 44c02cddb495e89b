"""Where a polling capture is, for each table: a value that goes into the mark, and comes out of it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from penstock.errors import SpoolCorruptError
from penstock.position import Position
from penstock.postgres.polled import EVERYTHING, Window

_MOST_KEPT = 1_000
"""Names of row versions in a mark, of a table. With more than that, some rows come twice after a restart."""

NONE_SEEN = pa.array([], pa.string())


@dataclass(frozen=True, slots=True, eq=False)
class TableState:
    """How a table goes on. `how` it was asked; when that changes, everything is asked for."""

    how: str
    window: Window = EVERYTHING
    seen: pa.StringArray = field(default_factory=lambda: NONE_SEEN)
    """The versions of rows in that window that have been given out."""
    keys: Position | None = None
    """Of the look whose keys are known; None if none are."""

    def anew(self) -> TableState:
        """To be read in full."""
        return replace(self, window=EVERYTHING, seen=NONE_SEEN)


@dataclass(frozen=True, slots=True, eq=False)
class PollingState:
    """`system` is whose it is: on another timeline the same transaction numbers stand for other transactions."""

    system: str
    reached: Position
    """Where the server's log was."""
    tables: Mapping[int, TableState] = field(default_factory=dict)
    """By OID."""

    def to_text(self) -> str:
        tables = {str(oid): _document(state) for oid, state in self.tables.items()}
        return json.dumps({"system": self.system, "reached": str(self.reached), "tables": tables})

    @classmethod
    def parse(cls, text: str) -> PollingState:
        try:
            document = json.loads(text)
            tables = {int(oid): _parse(state) for oid, state in document["tables"].items()}
            return cls(str(document["system"]), Position.parse(document["reached"]), tables)
        except (KeyError, TypeError, ValueError) as error:
            raise SpoolCorruptError(
                "what polling is to go on from cannot be read", hint="restore it from a copy, or copy the tables anew"
            ) from error

    def to_texts(self) -> dict[int, str]:
        """Each table by itself, for tables that begin."""
        return {oid: json.dumps({"system": self.system, **_document(state)}) for oid, state in self.tables.items()}


def parse_begin(text: str, system: str) -> TableState:
    """Where a table begins, or all of it if that was on another timeline."""
    document = json.loads(text)
    return _parse(document) if document["system"] == system else _parse(document).anew()


def _document(state: TableState) -> dict[str, object]:
    return {
        "how": state.how,
        "low": state.window.low,
        "horizon": state.window.horizon,
        "seen": state.seen.slice(0, _MOST_KEPT).to_pylist(),
        "keys": None if state.keys is None else str(state.keys),
    }


def _parse(document: Mapping[str, Any]) -> TableState:
    keys = document["keys"]
    return TableState(
        document["how"],
        Window(document["low"], document["horizon"]),
        pa.array(document["seen"], pa.string()),
        None if keys is None else Position.parse(keys),
    )
