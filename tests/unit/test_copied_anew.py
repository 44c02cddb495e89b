"""Tables that cannot follow their source, while the others go on: a real spool, and a sink that only keeps the books."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.pipeline.apply import EpochApplier
from penstock.pipeline.epochs import EpochLog
from penstock.pipeline.following import Follower
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.schema_policy import SchemaPolicy, SchemaRule
from penstock.pipeline.shadows import Shadows
from penstock.pipeline.states import TableState, TableStatus
from penstock.postgres.attributes import CatalogShape
from penstock.postgres.catalog import CatalogTable
from penstock.schema import Attributes, Column, TableName, TableSchema
from penstock.sinks.base import Target
from penstock.sinks.layout import Mode
from penstock.sinks.origin import Origin
from penstock.spool.consumers import released
from tests.unit.spool.builders import ITEMS, ORDERS, Commit, at, capture
from tests.unit.test_applier import Ledger

WIDE = replace(ITEMS, columns=(*ITEMS.columns, Column("more", pa.int32(), 23)))


def numbered(schema: TableSchema, *numbers: int, heap: str = "h") -> TableSchema:
    return replace(schema, attributes=Attributes(numbers, max(numbers), heap))


@dataclass
class Pair:
    """Orders stay as they are; items are wider from 300 on. The catalog has what `now` says."""

    root: Path
    policy: SchemaPolicy = SchemaPolicy.EVOLVE
    now: TableSchema = field(default_factory=lambda: numbered(WIDE, 1, 2, 3))
    anew: dict[TableName, str] = field(default_factory=dict)
    xids: frozenset[int] = frozenset()
    is_mirror: bool = True
    asked: int = 0

    def __post_init__(self) -> None:
        (self.root / "lake").mkdir()
        steps = [[Commit(position, (ORDERS, ITEMS if position < 300 else WIDE))] for position in range(100, 1001, 100)]
        capture(self.root / "spool", 0, steps)
        self.sink = Ledger()
        self.follower = Follower(lambda _: SchemaRule(self.policy, is_mirror=self.is_mirror), self._inspect)
        self.shadows = Shadows(self.sink, PipelineObserver(), lambda name, is_done: None, self.follower)
        self.applier = EpochApplier(
            self.sink,
            EpochLog(self.root / "lake", "p"),
            self.root / "spool",
            consumer="p",
            system="1/1",
            observer=PipelineObserver(),
            shadows=self.shadows,
            follower=self.follower,
            on_anew=self.anew.__setitem__,
        )

    def _inspect(self, table: CatalogTable) -> CatalogShape:
        self.asked += 1
        return CatalogShape(self.now, {}, 100, self.xids)

    def start(self, mode: Mode = Mode.MIRROR) -> None:
        targets = {schema.name: self._target(schema, mode) for schema in (ORDERS, ITEMS)}
        self.applier.adopt(targets, {name: TableStatus(TableState.STREAMING, at(100), at(100)) for name in targets})

    def _target(self, schema: TableSchema, mode: Mode) -> Target:
        self.sink.applied[schema.name] = at(100)
        origin = Origin.of(numbered(schema, *range(1, len(schema.columns) + 1)))
        columns = pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns])
        return Target(schema.name, schema.oid, schema.key, columns, at(100), mode, origin)

    @property
    def released(self) -> int:
        return released(self.root / "spool")["p"].value

    def state(self, schema: TableSchema) -> TableState:
        return self.applier.statuses[schema.name].state


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_a_table_that_cannot_follow_waits_for_its_copy_and_the_others_go_on(pair: Pair) -> None:
    pair.start()
    pair.applier.apply(at(200))
    assert pair.asked == 0, "nothing was new"
    pair.applier.apply(at(500))
    assert pair.anew == {ITEMS.name: "its target cannot be altered in place"}
    assert pair.state(ITEMS) is TableState.SNAPSHOTTING
    assert pair.sink.applied == {ORDERS.name: at(500), ITEMS.name: at(200)}
    assert pair.released == 200, "a run that ends now begins from there"
    assert not pair.applier.is_level, "a run that is to catch up waits for the copy"
    shadow = Ledger()
    pair.shadows.begin(ITEMS.name, shadow, at(500))
    pair.shadows.hold(ITEMS.name, at(500))
    copied = replace(pair._target(WIDE, Mode.MIRROR), applied=at(500), origin=Origin.of(pair.now))
    shadow.applied[ITEMS.name] = at(500)
    pair.shadows.enter(copied)
    pair.applier.apply(at(700))
    assert pair.state(ITEMS) is TableState.STREAMING
    assert pair.sink.applied[ITEMS.name] == at(700)
    assert pair.released == 700
    assert pair.applier.is_level


def test_a_table_that_can_neither_follow_nor_be_copied_fails_with_both_reasons(pair: Pair) -> None:
    pair.start()
    pair.applier.apply(at(300))
    pair.applier.give_up_copy(ITEMS.name, "it has no key")
    status = pair.applier.statuses[ITEMS.name]
    assert status.state is TableState.FAILED
    assert "cannot be altered in place" in (status.reason or "")
    assert "it has no key" in (status.reason or "")
    pair.applier.give_up_copy(ORDERS.name, "nobody asked for that")
    assert pair.state(ORDERS) is TableState.STREAMING


def test_S13_what_only_the_target_has_is_not_given_up_by_itself(tmp_path: Path) -> None:
    pair = Pair(tmp_path, is_mirror=False)
    pair.start(Mode.HISTORY)
    pair.applier.apply(at(300))
    assert pair.anew == {}
    assert pair.state(ITEMS) is TableState.FAILED
    assert "besides the rows of now" in (pair.applier.statuses[ITEMS.name].reason or "")


def test_S13_a_table_that_is_to_stop_stops(tmp_path: Path) -> None:
    pair = Pair(tmp_path, SchemaPolicy.STOP)
    pair.start()
    pair.applier.apply(at(300))
    assert pair.anew == {}
    assert (pair.state(ITEMS), pair.state(ORDERS)) == (TableState.FAILED, TableState.STREAMING)


def test_S02_a_column_made_again_under_its_name_is_found_in_the_catalog_alone(pair: Pair) -> None:
    pair.start()
    pair.applier.notice({ITEMS.name: numbered(ITEMS, 1, 3), ORDERS.name: numbered(ORDERS, 1, 2, 3)})
    pair.applier.apply(at(200))
    assert list(pair.anew) == [ITEMS.name]
    assert ITEMS.name not in pair.sink.taken
    assert pair.sink.taken[ORDERS.name] == [(100, 200)]


def test_S07_a_table_made_anew_is_found_in_the_catalog_alone(pair: Pair) -> None:
    pair.start()
    pair.applier.notice({ITEMS.name: replace(numbered(ITEMS, 1, 2), oid=99)})
    pair.applier.apply(at(200))
    assert pair.anew == {ITEMS.name: "it was dropped and made anew"}


def test_S02_a_shape_like_the_targets_is_not_trusted_once_the_catalog_has_other_columns(pair: Pair) -> None:
    """Dropped and made again, written to, and then altered once more: nothing in these changes shows it."""
    pair.start()
    pair.now = numbered(WIDE, 1, 3, 4)
    pair.applier.notice({ITEMS.name: pair.now})
    pair.applier.apply(at(200))
    assert list(pair.anew) == [ITEMS.name]


def test_S05_a_catalog_that_does_not_show_the_transaction_yet_is_asked_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pipeline.apply._PAUSE_SECONDS", 0.0)
    pair.start()
    pair.xids = frozenset({7})
    with pytest.raises(Exception, match="does not show yet"):
        pair.applier.apply(at(300))
    assert pair.asked == 3
    assert pair.anew == {}
    pair.xids = frozenset()
    pair.applier.apply(at(300))
    assert list(pair.anew) == [ITEMS.name]
