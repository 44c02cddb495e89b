"""Tables that need a resync while the others continue: a real spool, and a sink that only records
positions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pytest
from typing_extensions import override

from penstock.change import ChangeBatch, ChangeCounts, Transactions
from penstock.config.policies import SchemaPolicy, SchemaRule
from penstock.errors import RowUnidentifiedError, SinkError
from penstock.pipeline import error_policy
from penstock.pipeline.epoch_log import EpochLog
from penstock.pipeline.schema_changes.tracker import CatalogSnapshot, SchemaTracker
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.position import Position
from penstock.postgres.catalog import CatalogShape, CatalogTable
from penstock.schema import Attributes, Column, TableName, TableSchema
from penstock.sinks.base import TableChanges, Target
from penstock.sinks.evolution import Evolution
from penstock.sinks.lineage import Origin
from penstock.sinks.modes import Mode
from penstock.spool.reader import FileSlice, SpoolReader
from penstock.spool.retention import released_positions
from penstock.spool.writer import SpoolWriter
from tests.support.pipeline.epochs import open_epochs
from tests.support.pipeline.position_sink import PositionSink
from tests.support.spool.builders import ITEMS, ORDERS, Commit, at, batch, capture, time_of

WIDE = replace(ITEMS, columns=(*ITEMS.columns, Column("more", pa.int32(), 23)))


def numbered(schema: TableSchema, *numbers: int, heap: str = "h") -> TableSchema:
    return replace(schema, attributes=Attributes(numbers, max(numbers), heap))


@dataclass
class Pair:
    """Orders stay unchanged; items have more columns from 300 on. `now` chooses the catalog's state."""

    root: Path
    policy: SchemaPolicy = SchemaPolicy.EVOLVE
    now: TableSchema = field(default_factory=lambda: numbered(WIDE, 1, 2, 3))
    ordered: dict[TableName, str] = field(default_factory=dict)
    xids: frozenset[int] = frozenset()
    can_resync: bool = True
    sink: PositionSink = field(default_factory=PositionSink)
    last_items: int = 1000
    """After this there are no changes of items, or only under the other name."""
    renamed_to: TableName | None = None
    asked: int = 0

    def __post_init__(self) -> None:
        (self.root / "lake").mkdir()
        capture(
            self.root / "spool",
            0,
            [[Commit(position, (ORDERS, *self._items(position)))] for position in range(100, 1001, 100)],
        )
        self.tracker = SchemaTracker(
            lambda _: SchemaRule(self.policy, can_resync=self.can_resync), self._inspect
        )
        epochs = open_epochs(
            self.sink, self.root, tracker=self.tracker, order_resync=self.ordered.__setitem__
        )
        self.applier, self.resyncs = epochs.applier, epochs.resyncs

    def _items(self, position: int) -> list[TableSchema]:
        if position > self.last_items:
            return [] if self.renamed_to is None else [replace(ITEMS, name=self.renamed_to)]
        return [ITEMS if position < 300 else WIDE]

    def became(self) -> list[str] | None:
        target = self.sink.load_target(ITEMS.name)
        return None if target is None else list(target.schema.names)

    def _inspect(self, table: CatalogTable) -> CatalogShape:
        self.asked += 1
        return CatalogShape(self.now, {}, 100, self.xids)

    def start(self, mode: Mode = Mode.MIRROR) -> None:
        targets = {schema.name: self.target(schema, mode) for schema in (ORDERS, ITEMS)}
        self.applier.tables.start(
            targets, {name: TableStatus(TableState.STREAMING, at(100), at(100)) for name in targets}
        )

    def target(self, schema: TableSchema, mode: Mode = Mode.MIRROR) -> Target:
        self.sink.applied[schema.name] = at(100)
        origin = Origin.of(numbered(schema, *range(1, len(schema.columns) + 1)))
        columns = pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns])
        return Target(schema.name, schema.oid, schema.key, columns, at(100), mode, origin)

    @property
    def released(self) -> int:
        return released_positions(self.root / "spool")["p"].value

    def set_status(self, status: TableStatus) -> None:
        """Put items into this state."""
        tables = self.applier.tables
        tables.statuses = {**tables.statuses, ITEMS.name: status}

    def state(self, schema: TableSchema) -> TableState:
        return self.applier.tables.statuses[schema.name].state


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_a_table_that_cannot_follow_waits_for_its_copy_and_the_others_go_on(pair: Pair) -> None:
    pair.start()
    pair.applier.apply(at(200))
    assert pair.asked == 0, "nothing was new"
    pair.applier.apply(at(500))
    assert pair.ordered == {ITEMS.name: "its target cannot be altered in place"}
    assert pair.state(ITEMS) is TableState.SNAPSHOTTING
    assert pair.sink.applied == {ORDERS.name: at(500), ITEMS.name: at(200)}
    assert pair.released == 200, "a run that ends now resumes from there"
    assert not pair.applier.is_level, "a run that is to catch up waits for the copy"
    shadow = PositionSink()
    pair.resyncs.begin(ITEMS.name, shadow, at(500))
    pair.resyncs.set_fence(ITEMS.name, at(500))
    copied = replace(pair.target(WIDE), applied=at(500), origin=Origin.of(pair.now))
    shadow.applied[ITEMS.name] = at(500)
    pair.resyncs.add_copied(copied)
    pair.applier.apply(at(700))
    assert pair.state(ITEMS) is TableState.STREAMING
    assert pair.sink.applied[ITEMS.name] == at(700)
    assert pair.released == 700
    assert pair.applier.is_level


def _shadow_of(pair: Pair, schema: TableSchema, position: int) -> tuple[PositionSink, Target]:
    """A copy of the table that is exact at a position, and ready."""
    shadow = PositionSink()
    pair.resyncs.begin(schema.name, shadow, at(position))
    pair.resyncs.set_fence(schema.name, at(position))
    shadow.applied[schema.name] = at(position)
    origin = Origin.of(numbered(schema, *range(1, len(schema.columns) + 1)))
    columns = pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns])
    return shadow, Target(schema.name, schema.oid, schema.key, columns, at(position), Mode.MIRROR, origin)


def test_a_shadow_catches_up_and_is_prepared_beside_the_epochs_and_the_swap_applies_only_later_changes(
    pair: Pair,
) -> None:
    pair.start()
    pair.applier.apply(at(200))
    shadow, target = _shadow_of(pair, ORDERS, 200)
    pair.applier.apply(at(700))
    assert not shadow.taken
    assert pair.resyncs.holds == [at(200)], "the changes it has to catch up with are kept"
    pair.resyncs.add_copied(target)
    assert shadow.taken[ORDERS.name] == [(200, 700)]
    assert pair.resyncs.holds == [at(700)]
    assert pair.sink.prepared == [ORDERS.name]
    assert pair.sink.applied[ORDERS.name] == at(700), "the table itself has continued"
    pair.applier.apply(at(900))
    assert shadow.taken[ORDERS.name] == [(200, 700), (700, 900)]
    assert pair.sink.replaced == [ORDERS.name]
    assert pair.sink.cancelled == [ORDERS.name], "links that were not used go"
    assert pair.resyncs.holds == []


def test_changes_of_another_shape_are_left_to_the_epoch_that_swaps(pair: Pair) -> None:
    pair.start()
    pair.applier.apply(at(200))
    shadow, target = _shadow_of(pair, ITEMS, 200)
    pair.applier.apply(at(700))
    pair.resyncs.add_copied(target)
    assert not shadow.taken
    assert pair.asked == 1, "only the epoch read the catalog"


def test_changes_that_do_not_identify_their_row_reach_a_shadow_neither_before_the_swap_nor_with_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.start()
    pair.applier.apply(at(200))
    shadow, target = _shadow_of(pair, ORDERS, 200)
    pair.applier.apply(at(700))

    def refuse(slices: Sequence[FileSlice]) -> None:
        if slices:
            raise RowUnidentifiedError.of(ORDERS.name)

    monkeypatch.setattr("penstock.pipeline.snapshots.resync.check_identified", refuse)
    pair.resyncs.add_copied(target)
    assert not shadow.taken
    pair.applier.apply(at(700))
    assert not shadow.taken
    assert (pair.sink.replaced, ORDERS.name in pair.resyncs) == ([], False)


def test_a_shadow_that_cannot_be_prepared_is_left_to_the_epoch_and_one_that_was_given_up_is_not_prepared(
    pair: Pair,
) -> None:
    pair.start()
    pair.applier.apply(at(200))
    _, target = _shadow_of(pair, ORDERS, 200)
    pair.sink.refuses_preparing = True
    pair.resyncs.add_copied(target)
    assert pair.resyncs.is_waiting
    pair.resyncs.abandon(ORDERS.name)
    pair.sink.refuses_preparing = False
    pair.resyncs.add_copied(target)
    assert (pair.sink.prepared, pair.sink.cancelled) == ([], [ORDERS.name])
    pair.applier.apply(at(300))
    assert pair.sink.replaced == []


def test_a_table_that_can_neither_follow_nor_be_copied_fails_with_both_reasons(pair: Pair) -> None:
    pair.start()
    pair.applier.apply(at(300))
    pair.applier.tables.resync_failed(ITEMS.name, "it has no key")
    status = pair.applier.tables.statuses[ITEMS.name]
    assert status.state is TableState.FAILED
    assert "cannot be altered in place" in (status.reason or "")
    assert "it has no key" in (status.reason or "")
    pair.applier.tables.resync_failed(ORDERS.name, "not requested")
    assert pair.state(ORDERS) is TableState.STREAMING


def test_S13_rows_that_only_the_target_has_are_not_given_up_automatically(tmp_path: Path) -> None:
    pair = Pair(tmp_path, can_resync=False)
    pair.start(Mode.HISTORY)
    pair.applier.apply(at(300))
    assert pair.ordered == {}
    assert pair.state(ITEMS) is TableState.FAILED
    assert "everything except the current rows" in (pair.applier.tables.statuses[ITEMS.name].reason or "")


def test_S13_a_table_that_is_to_stop_stops(tmp_path: Path) -> None:
    pair = Pair(tmp_path, SchemaPolicy.STOP)
    pair.start()
    pair.applier.apply(at(300))
    assert pair.ordered == {}
    assert (pair.state(ITEMS), pair.state(ORDERS)) == (TableState.FAILED, TableState.STREAMING)


def test_S02_a_column_made_again_under_its_name_is_found_in_the_catalog_alone(pair: Pair) -> None:
    pair.start()
    pair.applier.observe_catalog(
        CatalogSnapshot({ITEMS.name: numbered(ITEMS, 1, 3), ORDERS.name: numbered(ORDERS, 1, 2, 3)})
    )
    pair.applier.apply(at(200))
    assert list(pair.ordered) == [ITEMS.name]
    assert ITEMS.name not in pair.sink.taken
    assert pair.sink.taken[ORDERS.name] == [(100, 200)]


def test_S07_a_recreated_table_is_found_in_the_catalog_alone(pair: Pair) -> None:
    pair.start()
    pair.applier.observe_catalog(CatalogSnapshot({ITEMS.name: replace(numbered(ITEMS, 1, 2), oid=99)}))
    pair.applier.apply(at(200))
    assert pair.ordered == {ITEMS.name: "it was dropped and recreated"}


def test_S07_a_recreated_table_is_resynced_though_it_is_retrying(pair: Pair) -> None:
    pair.start()
    pair.set_status(TableStatus(TableState.RETRYING, at(100), at(100), "no"))
    pair.applier.tables.retries.count(ITEMS.name, error_policy.decide(SinkError("no"), ITEMS.name))
    pair.applier.observe_catalog(CatalogSnapshot({ITEMS.name: replace(numbered(ITEMS, 1, 2), oid=99)}))
    pair.applier.apply(at(200))
    assert pair.state(ITEMS) is TableState.SNAPSHOTTING
    assert pair.released == 100, "a run that ends now resumes from there"


def test_S02_a_shape_like_the_targets_is_not_trusted_once_the_catalog_has_other_columns(pair: Pair) -> None:
    """Dropped and recreated, written to, and then altered again: the changes do not show it."""
    pair.start()
    pair.now = numbered(WIDE, 1, 3, 4)
    pair.applier.observe_catalog(CatalogSnapshot({ITEMS.name: pair.now}))
    pair.applier.apply(at(200))
    assert list(pair.ordered) == [ITEMS.name]


def test_S05_a_catalog_that_does_not_show_the_transaction_yet_is_read_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.error_policy.FIRST_SECONDS", 0.0)
    pair.start()
    pair.xids = frozenset({7})
    pair.applier.apply(at(300))
    status = pair.applier.tables.statuses[ITEMS.name]
    assert (status.state, "does not yet show" in (status.reason or "")) == (TableState.RETRYING, True)
    assert pair.ordered == {}
    pair.xids = frozenset()
    pair.applier.apply(at(300))
    assert list(pair.ordered) == [ITEMS.name]


class Following(PositionSink):
    """Its tables accept every schema change."""

    def __init__(self) -> None:
        super().__init__()
        self.became: dict[TableName, Target] = {}

    @override
    def can_evolve(self, target: Target, evolution: Evolution) -> bool:
        return True

    @override
    def load_target(self, table: TableName) -> Target | None:
        return self.became.get(table)

    @override
    def apply(self, target: Target, changes: TableChanges, end: Position) -> None:
        super().apply(target, changes, end)
        if changes.evolution is not None:
            new = changes.evolution
            self.became[target.table] = replace(
                target, schema=new.columns, key=new.key, origin=new.origin, applied=end
            )


@pytest.fixture
def idle(tmp_path: Path) -> Pair:
    """The table of items has no change after 200."""
    return Pair(tmp_path, sink=Following(), last_items=200)


def test_S06_schema_changes_of_an_idle_table_are_followed_once_all_earlier_changes_are_applied(
    idle: Pair,
) -> None:
    idle.start()
    idle.applier.observe_catalog(
        CatalogSnapshot({ITEMS.name: idle.now, ORDERS.name: numbered(ORDERS, 1, 2, 3)}, at(400))
    )
    assert not idle.applier.is_level, "a run that is to catch up waits for it"
    idle.applier.apply(at(300))
    assert idle.became() is None, "changes of the former schema may still arrive"
    idle.applier.apply(at(500))
    assert idle.became() == ["id", "note", "more"]
    assert idle.sink.applied[ITEMS.name] == at(500)
    assert idle.applier.is_level
    asked = idle.asked
    idle.applier.apply(at(600))
    assert (idle.asked, idle.sink.applied[ITEMS.name]) == (asked, at(500)), (
        "it has been followed, and there is nothing new"
    )


def test_S06_an_idle_table_is_followed_without_an_epoch(idle: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pipeline.applier._IDLE_SECONDS", 0.0)
    idle.start()
    idle.applier.apply(at(200))
    idle.applier.apply(at(1000))
    idle.applier.observe_catalog(CatalogSnapshot({ITEMS.name: idle.now}, at(1000)))
    assert not idle.applier.is_stuck
    idle.applier.apply_if_idle()
    assert idle.became() == ["id", "note", "more"]


def test_S06_a_table_that_has_all_of_the_log_is_followed_with_the_next_epoch_and_says_so(idle: Pair) -> None:
    idle.start()
    idle.applier.apply(at(500))
    idle.applier.observe_catalog(CatalogSnapshot({ITEMS.name: idle.now}, at(500)))
    assert idle.applier.is_stuck
    idle.applier.apply(at(500))
    assert idle.became() is None, "an epoch that was applied is not applied again"
    idle.applier.apply(at(600))
    assert idle.became() == ["id", "note", "more"]
    assert not idle.applier.is_stuck


def test_S05_outdated_observations_are_not_followed(idle: Pair) -> None:
    """It was altered again since, and changes from before that may still arrive."""
    idle.start()
    idle.applier.observe_catalog(CatalogSnapshot({ITEMS.name: idle.now}, at(400)))
    idle.now = numbered(replace(WIDE, columns=(*WIDE.columns, Column("later", pa.int32(), 23))), 1, 2, 3, 4)
    idle.applier.apply(at(500))
    assert idle.became() is None
    idle.applier.observe_catalog(CatalogSnapshot({ITEMS.name: idle.now}, at(700)))
    idle.applier.apply(at(700))
    assert idle.became() == ["id", "note", "more", "later"]


def test_S13_an_idle_table_is_stopped_by_a_change_that_its_policy_forbids(tmp_path: Path) -> None:
    pair = Pair(tmp_path, SchemaPolicy.STOP, sink=Following(), last_items=200)
    pair.start()
    pair.applier.observe_catalog(CatalogSnapshot({ITEMS.name: pair.now}, at(300)))
    pair.applier.apply(at(300))
    assert (pair.state(ITEMS), pair.state(ORDERS)) == (TableState.FAILED, TableState.STREAMING)


def test_S07_a_table_that_is_dropped_is_gone_once_all_that_there_was_of_it_is_applied(idle: Pair) -> None:
    idle.start()
    idle.applier.observe_catalog(CatalogSnapshot({}, at(300), {ITEMS.name: "it was dropped"}))
    idle.applier.apply(at(200))
    assert idle.state(ITEMS) is TableState.STREAMING
    idle.applier.apply(at(500))
    status = idle.applier.tables.statuses[ITEMS.name]
    assert (status.state, status.reason) == (TableState.GONE, "it was dropped")
    assert idle.sink.taken[ITEMS.name] == [(100, 200)]
    assert idle.applier.is_level
    assert idle.released == 500, "it keeps nothing"
    assert EpochLog(idle.root / "lake", "p").last() == idle.applier.last


def test_S07_a_renamed_table_takes_over_the_state_under_its_old_name(tmp_path: Path) -> None:
    pair = Pair(tmp_path, last_items=200, renamed_to=TableName("public", "things"))
    pair.start()
    pair.applier.apply(at(500))
    assert pair.ordered == {ITEMS.name: "it was called public.things"}
    assert pair.sink.applied[ITEMS.name] == at(500)
    assert pair.sink.taken[ITEMS.name] == [(100, 500)]
    assert pair.state(ITEMS) is TableState.SNAPSHOTTING, (
        "the catalog decides whether there is something to copy"
    )
    pair.applier.tables.request_dropped(ITEMS.name, "it is called public.things now")
    pair.applier.apply(at(600))
    assert pair.state(ITEMS) is TableState.GONE
    assert pair.applier.is_level


def test_S07_rows_that_only_the_target_has_are_not_given_up_because_its_table_was_renamed(
    tmp_path: Path,
) -> None:
    pair = Pair(tmp_path, can_resync=False, last_items=200, renamed_to=TableName("public", "things"))
    pair.start(Mode.HISTORY)
    pair.applier.apply(at(500))
    assert pair.ordered == {}
    assert pair.state(ITEMS) is TableState.FAILED
    assert "public.things" in (pair.applier.tables.statuses[ITEMS.name].reason or "")


def test_S02_columns_dropped_and_added_unseen_are_followed_only_if_nothing_can_have_been_applied_in_between(
    idle: Pair,
) -> None:
    """The changes do not show that a column was dropped and recreated."""
    idle.start()
    idle.now = numbered(replace(ITEMS, columns=(ITEMS.columns[0], Column("other", pa.string(), 25))), 1, 3)
    idle.applier.observe_catalog(CatalogSnapshot({ITEMS.name: numbered(ITEMS, 1, 2)}, at(150)))
    idle.applier.apply(at(200))
    idle.applier.observe_catalog(CatalogSnapshot({ITEMS.name: idle.now}, at(300)))
    idle.applier.apply(at(300))
    assert list(idle.ordered) == [ITEMS.name]


def test_S02_columns_dropped_and_added_while_a_table_was_idle_are_followed(idle: Pair) -> None:
    idle.start()
    idle.now = numbered(replace(ITEMS, columns=(ITEMS.columns[0], Column("other", pa.string(), 25))), 1, 3)
    idle.applier.apply(at(300))
    idle.applier.observe_catalog(CatalogSnapshot({ITEMS.name: numbered(ITEMS, 1, 2)}, at(350)))
    idle.applier.observe_catalog(CatalogSnapshot({ITEMS.name: idle.now}, at(400)))
    idle.applier.apply(at(500))
    assert idle.became() == ["id", "note", "other"]


def test_R12_the_transactions_that_emptied_a_table_are_remembered_by_their_32_bits(pair: Pair) -> None:
    pair.start()
    assert pair.applier.truncates(ITEMS.name) == frozenset()
    rows = pa.concat_batches(
        [batch(ITEMS, [(100, 0)], xid=8).rows, batch(ITEMS, [(200, 0)], xid=(1 << 32) + 9).rows]
    )
    place = rows.schema.get_field_index("_change_type")
    rows = rows.set_column(
        place, rows.schema.field(place), pa.array(["insert", "truncate"], rows.schema.field(place).type)
    )
    writer = SpoolWriter(pair.root / "other", at(0))
    changes = ChangeBatch(ITEMS, rows, ChangeCounts(inserts=1, truncates=1))
    writer.append(Transactions((changes,), at(200), time_of(200), 2))
    writer.seal()
    writer.close()
    found = SpoolReader(pair.root / "other").read(at(0), at(200)).tables[ITEMS.name]
    pair.tracker.follow(pair.sink, pair.target(ITEMS), TableChanges(ITEMS.name, found.slices, found.counts))
    assert pair.applier.truncates(ITEMS.name) == {9}


def test_a_table_that_has_to_be_resynced_again_and_again_fails_instead(pair: Pair) -> None:
    """A cause that a resync does not remove would trigger one resync after the other."""
    pair.start()
    resyncs = 0
    while pair.state(ITEMS) is not TableState.FAILED:
        resyncs += 1
        assert resyncs <= error_policy.MOST_RESYNCS + 1
        pair.set_status(TableStatus(TableState.STREAMING, at(200), at(200)))
        pair.applier.apply(at(500))
    assert resyncs == error_policy.MOST_RESYNCS + 1
    status = pair.applier.tables.statuses[ITEMS.name]
    assert (
        "resynced 20 times within an hour, and needs another resync: its target cannot be altered in place"
        in (status.reason or "")
    )
    assert status.remedy
    assert pair.state(ORDERS) is TableState.STREAMING


def test_another_copy_of_a_table_that_was_altered_while_it_was_resynced_waits_for_a_pause(pair: Pair) -> None:
    pair.start()
    shadow = PositionSink()
    pair.resyncs.begin(ITEMS.name, shadow, at(100))
    shadow.applied[ITEMS.name] = at(200)
    pair.resyncs.add_copied(replace(pair.target(ITEMS), applied=at(200)))
    pair.applier.apply(at(500))
    assert ITEMS.name not in pair.resyncs
    assert not pair.resyncs.may_begin(ITEMS.name), "not at once"
    assert pair.resyncs.is_busy, "a run that is to catch up waits for it"
    now = time.monotonic() + error_policy.LONGEST_SECONDS
    pair.resyncs._attempts._clock = lambda: now
    assert pair.resyncs.may_begin(ITEMS.name)


@pytest.mark.parametrize("ending", ["removed", "refused", "dropped"])
def test_a_run_does_not_wait_for_another_copy_of_a_table_that_is_not_to_be_resynced_any_more(
    pair: Pair, ending: str
) -> None:
    pair.start()
    shadow = PositionSink()
    pair.resyncs.begin(ITEMS.name, shadow, at(100))
    shadow.applied[ITEMS.name] = at(200)
    pair.resyncs.add_copied(replace(pair.target(ITEMS), applied=at(200)))
    pair.applier.apply(at(500))
    assert pair.resyncs.is_busy
    if ending == "removed":
        pair.applier.tables.remove(ITEMS.name, lambda: pair.resyncs.abandon(ITEMS.name))
    elif ending == "dropped":
        pair.applier.tables.request_dropped(ITEMS.name, "it was dropped")
    else:
        pair.applier.tables.resync_failed(ITEMS.name, "it has no key")
    pair.applier.apply(at(600))
    assert not pair.resyncs.is_busy
    assert pair.resyncs.may_begin(ITEMS.name), "a later order is not held up by this one"
