"""Operator overrides for single tables: add, remove, pause, resume, resync, replay.

The overrides are a small document in the state directory. The command line writes it, whether or not the
pipeline runs. A running pipeline reads it every second. It holds the requested state, so a repeated request
changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock import storage
from penstock.config.model import PipelineConfig
from penstock.errors import SpoolCorruptError
from penstock.pipeline.retries import check_format
from penstock.schema import TableName
from penstock.storage.locks import exclusive

FILE = "tables.json"
_LOCK = "tables.lock"
_FORMAT = 1
_FIELDS = ("added", "removed", "paused", "resync", "replay")


@dataclass(frozen=True, slots=True)
class TableOverrides:
    """The requested state of tables. `added` and `removed` override the tables of the configuration. A table
    is removed from `resync` or `replay` when that request is done.
    """

    added: frozenset[TableName] = frozenset()
    removed: frozenset[TableName] = frozenset()
    paused: frozenset[TableName] = frozenset()
    resync: frozenset[TableName] = frozenset()
    replay: frozenset[TableName] = frozenset()
    """Tables whose dead letters are to be replayed."""

    def add(self, names: Iterable[TableName]) -> TableOverrides:
        wanted = frozenset(names)
        return replace(self, added=self.added | wanted, removed=self.removed - wanted)

    def remove(self, names: Iterable[TableName]) -> TableOverrides:
        unwanted = frozenset(names)
        return TableOverrides(
            self.added - unwanted,
            self.removed | unwanted,
            self.paused - unwanted,
            self.resync - unwanted,
            self.replay - unwanted,
        )

    def pause(self, names: Iterable[TableName]) -> TableOverrides:
        return replace(self, paused=self.paused | frozenset(names))

    def resume(self, names: Iterable[TableName]) -> TableOverrides:
        return replace(self, paused=self.paused - frozenset(names))

    def request_resync(self, names: Iterable[TableName]) -> TableOverrides:
        return replace(self, resync=self.resync | frozenset(names))

    def clear_resync(self, name: TableName) -> TableOverrides:
        """Remove the request to resync the table, because the resync is done."""
        return replace(self, resync=self.resync - {name})

    def replay_dead_letters(self, names: Iterable[TableName]) -> TableOverrides:
        return replace(self, replay=self.replay | frozenset(names))

    def replayed(self, name: TableName) -> TableOverrides:
        return replace(self, replay=self.replay - {name})


def load_overrides(state: Path) -> TableOverrides:
    """Load the stored overrides. Empty if nothing is stored."""
    try:
        data = storage.read(state / FILE)
    except OSError:
        data = None  # a command that writes there reports the error
    if data is None:
        return TableOverrides()
    try:
        document = json.loads(data)
        check_format(document, _FORMAT, state / FILE)
        return TableOverrides(
            *(frozenset(map(TableName.parse, document.get(field, ()))) for field in _FIELDS)
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpoolCorruptError(
            f"{state / FILE} has invalid content",
            hint="remove the file, and run the `penstock tables` commands again",
        ) from error


def with_overrides(config: PipelineConfig) -> PipelineConfig:
    """Return the configuration with the stored overrides applied."""
    orders = load_overrides(config.state)
    return config.with_tables(orders.added, orders.removed)


def change_overrides(state: Path, change: Callable[[TableOverrides], TableOverrides]) -> TableOverrides:
    """Read the overrides, apply `change` and write the result, under a lock between processes. Returns the
    new overrides.
    """
    storage.ensure_directory(state)
    with exclusive(state / _LOCK):
        before = load_overrides(state)
        after = change(before)
        if after != before:
            document = {"format": _FORMAT} | {
                field: sorted(map(str, getattr(after, field))) for field in _FIELDS
            }
            storage.put(state / FILE, json.dumps(document, indent=2).encode())
        return after
