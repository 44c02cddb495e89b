"""What a person has ordered about single tables: add, remove, pause, resume, resync, replay.

Orders are a small document in the state directory. The command line writes it, whether the pipeline runs or not; the pipeline looks at it
every second, and makes it so. It holds what is wanted, not what was said: ordering twice is ordering once.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import SpoolCorruptError
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.formats import check_format
from penstock.schema import TableName
from penstock.spool import storage

FILE = "tables.json"
_LOCK = "tables.lock"
_FORMAT = 1
_FIELDS = ("added", "removed", "paused", "resync", "replay")


@dataclass(frozen=True, slots=True)
class TableOrders:
    """`added` and `removed` go beyond, and against, the configuration. `resync` and `replay` empty themselves as that is done."""

    added: frozenset[TableName] = frozenset()
    removed: frozenset[TableName] = frozenset()
    paused: frozenset[TableName] = frozenset()
    resync: frozenset[TableName] = frozenset()
    replay: frozenset[TableName] = frozenset()
    """Tables whose dead letters are to be applied."""

    def add(self, names: Iterable[TableName]) -> TableOrders:
        wanted = frozenset(names)
        return replace(self, added=self.added | wanted, removed=self.removed - wanted)

    def remove(self, names: Iterable[TableName]) -> TableOrders:
        unwanted = frozenset(names)
        return TableOrders(
            self.added - unwanted, self.removed | unwanted, self.paused - unwanted, self.resync - unwanted, self.replay - unwanted
        )

    def pause(self, names: Iterable[TableName]) -> TableOrders:
        return replace(self, paused=self.paused | frozenset(names))

    def resume(self, names: Iterable[TableName]) -> TableOrders:
        return replace(self, paused=self.paused - frozenset(names))

    def renew(self, names: Iterable[TableName]) -> TableOrders:
        return replace(self, resync=self.resync | frozenset(names))

    def renewed(self, name: TableName) -> TableOrders:
        """The order to resync has been carried out."""
        return replace(self, resync=self.resync - {name})

    def replay_letters(self, names: Iterable[TableName]) -> TableOrders:
        return replace(self, replay=self.replay | frozenset(names))

    def replayed(self, name: TableName) -> TableOrders:
        return replace(self, replay=self.replay - {name})


def load_orders(state: Path) -> TableOrders:
    """As they stand; none before the first."""
    try:
        data = storage.read_bytes(state / FILE)
    except OSError:
        data = None  # whoever has to write there says what is wrong with the place
    if data is None:
        return TableOrders()
    try:
        document = json.loads(data)
        check_format(document, _FORMAT, state / FILE)
        return TableOrders(*(frozenset(map(TableName.parse, document.get(field, ()))) for field in _FIELDS))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpoolCorruptError(f"{state / FILE} cannot be understood", hint="remove the file, and give the orders again") from error


def with_orders(config: PipelineConfig) -> PipelineConfig:
    """The configuration as if its file said what was ordered."""
    orders = load_orders(config.state)
    return config.with_tables(orders.added, orders.removed)


def change_orders(state: Path, change: Callable[[TableOrders], TableOrders]) -> TableOrders:
    """Read, change and write as one step, also when somebody else does the same; gives back what stands now."""
    storage.make_directory(state)
    storage.ensure_file(state / _LOCK)
    with (state / _LOCK).open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = load_orders(state)
        after = change(before)
        if after != before:
            document = {"format": _FORMAT} | {field: sorted(map(str, getattr(after, field))) for field in _FIELDS}
            storage.replace_bytes(state / FILE, json.dumps(document, indent=2).encode())
        return after
