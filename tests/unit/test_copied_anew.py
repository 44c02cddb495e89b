"""Tables that cannot follow their source, while the others go on: a real spool, and a sink that only keeps the books."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pytest
from typing_extensions import override

from penstock.change import ChangeBatch, ChangeCounts, Transactions
from penstock.errors import RowUnidentifiedError, SinkError
from penstock.pipeline import error_policy
from penstock.pipeline.apply import EpochApplier
from penstock.pipeline.epochs import EpochLog
from penstock.pipeline.following.follower import Follower
from penstock.pipeline.following.sightings import Look
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.schema_policy import SchemaPolicy, SchemaRule
from penstock.pipeline.snapshots.shadows import Shadows
from penstock.pipeline.states import TableState, TableStatus
from penstock.position import Position
from penstock.postgres.attributes import CatalogShape
from penstock.postgres.catalog import CatalogTable
from penstock.schema import Attributes, Column, TableName, TableSchema
from penstock.sinks.base import TableChanges, Target
from penstock.sinks.evolution import Evolution
from penstock.sinks.layout import Mode
from penstock.sinks.origin import Origin
from penstock.spool.consumers import released
from penstock.spool.range import FileSlice
from penstock.spool.reader import SpoolReader
from penstock.spool.writer import SpoolWriter
from tests.unit.spool.builders import ITEMS, ORDERS, Commit, at, batch, capture, time_of
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
    sink: Ledger = field(default_factory=Ledger)
    last_items: int = 1000
    """After which there are no changes of items, or only under the other name."""
    renamed_to: TableName | None = None
    asked: int = 0

    def __post_init__(self) -> None:
        (self.root / "lake").mkdir()
        capture(self.root / "spool", 0, [[Commit(position, (ORDERS, *self._items(position)))] for position in range(100, 1001, 100)])
        self.follower = Follower(lambda _: SchemaRule(self.policy, is_mirror=self.is_mirror), self._inspect)
        self.shadows = Shadows(self.sink, PipelineObserver(), lambda name, is_done: None, self.follower, spool=self.root / "spool")
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
        self.applier.adopt(targets, {name: TableStatus(TableState.STREAMING, at(100), at(100)) for name in targets})

    def target(self, schema: TableSchema, mode: Mode = Mode.MIRROR) -> Target:
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
    copied = replace(pair.target(WIDE), applied=at(500), origin=Origin.of(pair.now))
    shadow.applied[ITEMS.name] = at(500)
    pair.shadows.enter(copied)
    pair.applier.apply(at(700))
    assert pair.state(ITEMS) is TableState.STREAMING
    assert pair.sink.applied[ITEMS.name] == at(700)
    assert pair.released == 700
    assert pair.applier.is_level


def _shadow_of(pair: Pair, schema: TableSchema, position: int) -> tuple[Ledger, Target]:
    """A copy of the table that is exact at a position, and ready."""
    shadow = Ledger()
    pair.shadows.begin(schema.name, shadow, at(position))
    pair.shadows.hold(schema.name, at(position))
    shadow.applied[schema.name] = at(position)
    origin = Origin.of(numbered(schema, *range(1, len(schema.columns) + 1)))
    columns = pa.schema([pa.field(column.name, column.arrow_type) for column in schema.columns])
    return shadow, Target(schema.name, schema.oid, schema.key, columns, at(position), Mode.MIRROR, origin)


def test_a_shadow_catches_up_and_is_prepared_beside_the_epochs_and_the_swap_applies_only_what_came_since(pair: Pair) -> None:
    pair.start()
    pair.applier.apply(at(200))
    shadow, target = _shadow_of(pair, ORDERS, 200)
    pair.applier.apply(at(700))
    assert not shadow.taken
    assert pair.shadows.holds == [at(200)], "what it has to catch up with is kept"
    pair.shadows.enter(target)
    assert shadow.taken[ORDERS.name] == [(200, 700)]
    assert pair.shadows.holds == [at(700)]
    assert pair.sink.prepared == [ORDERS.name]
    assert pair.sink.applied[ORDERS.name] == at(700), "the table itself has gone on"
    pair.applier.apply(at(900))
    assert shadow.taken[ORDERS.name] == [(200, 700), (700, 900)]
    assert pair.sink.replaced == [ORDERS.name]
    assert pair.sink.cancelled == [ORDERS.name], "links that were not used go"
    assert pair.shadows.holds == []


def test_changes_of_another_shape_are_left_to_the_epoch_that_swaps(pair: Pair) -> None:
    pair.start()
    pair.applier.apply(at(200))
    shadow, target = _shadow_of(pair, ITEMS, 200)
    pair.applier.apply(at(700))
    pair.shadows.enter(target)
    assert not shadow.taken
    assert pair.asked == 1, "only the epoch looked at the catalog"


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

    monkeypatch.setattr("penstock.pipeline.snapshots.shadows.check_identified", refuse)
    pair.shadows.enter(target)
    assert not shadow.taken
    pair.applier.apply(at(700))
    assert not shadow.taken
    assert (pair.sink.replaced, ORDERS.name in pair.shadows) == ([], False)


def test_a_shadow_that_cannot_be_prepared_is_left_to_the_epoch_and_one_that_was_given_up_is_not_prepared(pair: Pair) -> None:
    pair.start()
    pair.applier.apply(at(200))
    _, target = _shadow_of(pair, ORDERS, 200)
    pair.sink.refuses_preparing = True
    pair.shadows.enter(target)
    assert pair.shadows.is_waiting
    pair.shadows.abandon(ORDERS.name)
    pair.sink.refuses_preparing = False
    pair.shadows.enter(target)
    assert (pair.sink.prepared, pair.sink.cancelled) == ([], [ORDERS.name])
    pair.applier.apply(at(300))
    assert pair.sink.replaced == []


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
    pair.applier.notice(Look({ITEMS.name: numbered(ITEMS, 1, 3), ORDERS.name: numbered(ORDERS, 1, 2, 3)}))
    pair.applier.apply(at(200))
    assert list(pair.anew) == [ITEMS.name]
    assert ITEMS.name not in pair.sink.taken
    assert pair.sink.taken[ORDERS.name] == [(100, 200)]


def test_S07_a_table_made_anew_is_found_in_the_catalog_alone(pair: Pair) -> None:
    pair.start()
    pair.applier.notice(Look({ITEMS.name: replace(numbered(ITEMS, 1, 2), oid=99)}))
    pair.applier.apply(at(200))
    assert pair.anew == {ITEMS.name: "it was dropped and made anew"}


def test_S07_a_table_made_anew_is_resynced_though_it_is_retrying(pair: Pair) -> None:
    pair.start()
    pair.applier._ledger.write({ITEMS.name: TableStatus(TableState.RETRYING, at(100), at(100), "no")})
    pair.applier._retries.count(ITEMS.name, error_policy.decide(SinkError("no"), ITEMS.name))
    pair.applier.notice(Look({ITEMS.name: replace(numbered(ITEMS, 1, 2), oid=99)}))
    pair.applier.apply(at(200))
    assert pair.state(ITEMS) is TableState.SNAPSHOTTING
    assert pair.released == 100, "a run that ends now begins from there"


def test_S02_a_shape_like_the_targets_is_not_trusted_once_the_catalog_has_other_columns(pair: Pair) -> None:
    """Dropped and made again, written to, and then altered once more: nothing in these changes shows it."""
    pair.start()
    pair.now = numbered(WIDE, 1, 3, 4)
    pair.applier.notice(Look({ITEMS.name: pair.now}))
    pair.applier.apply(at(200))
    assert list(pair.anew) == [ITEMS.name]


def test_S05_a_catalog_that_does_not_show_the_transaction_yet_is_asked_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pipeline.error_policy.FIRST_SECONDS", 0.0)
    pair.start()
    pair.xids = frozenset({7})
    pair.applier.apply(at(300))
    status = pair.applier.statuses[ITEMS.name]
    assert (status.state, "does not show yet" in (status.reason or "")) == (TableState.RETRYING, True)
    assert pair.anew == {}
    pair.xids = frozenset()
    pair.applier.apply(at(300))
    assert list(pair.anew) == [ITEMS.name]


class Following(Ledger):
    """Its tables become whatever they have to."""

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
            self.became[target.table] = replace(target, schema=new.columns, key=new.key, origin=new.origin, applied=end)


@pytest.fixture
def idle(tmp_path: Path) -> Pair:
    """The table of items has no change after 200."""
    return Pair(tmp_path, sink=Following(), last_items=200)


def test_S06_what_is_done_to_an_idle_table_is_followed_once_all_changes_from_before_are_applied(idle: Pair) -> None:
    idle.start()
    idle.applier.notice(Look({ITEMS.name: idle.now, ORDERS.name: numbered(ORDERS, 1, 2, 3)}, at(400)))
    assert not idle.applier.is_level, "a run that is to catch up waits for it"
    idle.applier.apply(at(300))
    assert idle.became() is None, "changes of the former shape might still be to come"
    idle.applier.apply(at(500))
    assert idle.became() == ["id", "note", "more"]
    assert idle.sink.applied[ITEMS.name] == at(500)
    assert idle.applier.is_level
    asked = idle.asked
    idle.applier.apply(at(600))
    assert (idle.asked, idle.sink.applied[ITEMS.name]) == (asked, at(500)), "it has been followed, and there is nothing new"


def test_S06_an_idle_table_is_followed_though_no_epoch_comes_by_itself(idle: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pipeline.apply._IDLE_SECONDS", 0.0)
    idle.start()
    idle.applier.apply(at(200))
    idle.applier.apply(at(1000))
    idle.applier.notice(Look({ITEMS.name: idle.now}, at(1000)))
    assert not idle.applier.is_stuck
    idle.applier.settle()
    assert idle.became() == ["id", "note", "more"]


def test_S06_a_table_that_has_all_of_the_log_is_followed_with_the_next_epoch_and_says_so(idle: Pair) -> None:
    idle.start()
    idle.applier.apply(at(500))
    idle.applier.notice(Look({ITEMS.name: idle.now}, at(500)))
    assert idle.applier.is_stuck
    idle.applier.apply(at(500))
    assert idle.became() is None, "an epoch that was applied is not applied again"
    idle.applier.apply(at(600))
    assert idle.became() == ["id", "note", "more"]
    assert not idle.applier.is_stuck


def test_S05_what_was_seen_and_is_no_more_is_not_followed(idle: Pair) -> None:
    """It was altered again since, and there may be changes to come that were made before that."""
    idle.start()
    idle.applier.notice(Look({ITEMS.name: idle.now}, at(400)))
    idle.now = numbered(replace(WIDE, columns=(*WIDE.columns, Column("later", pa.int32(), 23))), 1, 2, 3, 4)
    idle.applier.apply(at(500))
    assert idle.became() is None
    idle.applier.notice(Look({ITEMS.name: idle.now}, at(700)))
    idle.applier.apply(at(700))
    assert idle.became() == ["id", "note", "more", "later"]


def test_S13_an_idle_table_is_stopped_by_what_its_policy_will_not_have(tmp_path: Path) -> None:
    pair = Pair(tmp_path, SchemaPolicy.STOP, sink=Following(), last_items=200)
    pair.start()
    pair.applier.notice(Look({ITEMS.name: pair.now}, at(300)))
    pair.applier.apply(at(300))
    assert (pair.state(ITEMS), pair.state(ORDERS)) == (TableState.FAILED, TableState.STREAMING)


def test_S07_a_table_that_is_dropped_is_gone_once_all_that_there_was_of_it_is_applied(idle: Pair) -> None:
    idle.start()
    idle.applier.notice(Look({}, at(300), {ITEMS.name: "it was dropped"}))
    idle.applier.apply(at(200))
    assert idle.state(ITEMS) is TableState.STREAMING
    idle.applier.apply(at(500))
    status = idle.applier.statuses[ITEMS.name]
    assert (status.state, status.reason) == (TableState.GONE, "it was dropped")
    assert idle.sink.taken[ITEMS.name] == [(100, 200)]
    assert idle.applier.is_level
    assert idle.released == 500, "it keeps nothing"
    assert EpochLog(idle.root / "lake", "p").last() == idle.applier.last


def test_S07_a_table_whose_changes_come_under_another_name_takes_what_it_had_under_its_own(tmp_path: Path) -> None:
    pair = Pair(tmp_path, last_items=200, renamed_to=TableName("public", "things"))
    pair.start()
    pair.applier.apply(at(500))
    assert pair.anew == {ITEMS.name: "it was called public.things"}
    assert pair.sink.applied[ITEMS.name] == at(500)
    assert pair.sink.taken[ITEMS.name] == [(100, 500)]
    assert pair.state(ITEMS) is TableState.SNAPSHOTTING, "whether there is something to copy, the catalog says"
    pair.applier.lose(ITEMS.name, "it is called public.things now")
    pair.applier.apply(at(600))
    assert pair.state(ITEMS) is TableState.GONE
    assert pair.applier.is_level


def test_S07_what_only_the_target_has_is_not_given_up_because_its_table_was_renamed(tmp_path: Path) -> None:
    pair = Pair(tmp_path, is_mirror=False, last_items=200, renamed_to=TableName("public", "things"))
    pair.start(Mode.HISTORY)
    pair.applier.apply(at(500))
    assert pair.anew == {}
    assert pair.state(ITEMS) is TableState.FAILED
    assert "public.things" in (pair.applier.statuses[ITEMS.name].reason or "")


def test_S02_columns_that_went_and_came_unseen_are_followed_only_if_nothing_can_have_been_applied_in_between(idle: Pair) -> None:
    """A column that is dropped and made again shows in no change."""
    idle.start()
    idle.now = numbered(replace(ITEMS, columns=(ITEMS.columns[0], Column("other", pa.string(), 25))), 1, 3)
    idle.applier.notice(Look({ITEMS.name: numbered(ITEMS, 1, 2)}, at(150)))
    idle.applier.apply(at(200))
    idle.applier.notice(Look({ITEMS.name: idle.now}, at(300)))
    idle.applier.apply(at(300))
    assert list(idle.anew) == [ITEMS.name]


def test_S02_columns_that_went_and_came_while_a_table_was_idle_are_followed(idle: Pair) -> None:
    idle.start()
    idle.now = numbered(replace(ITEMS, columns=(ITEMS.columns[0], Column("other", pa.string(), 25))), 1, 3)
    idle.applier.apply(at(300))
    idle.applier.notice(Look({ITEMS.name: numbered(ITEMS, 1, 2)}, at(350)))
    idle.applier.notice(Look({ITEMS.name: idle.now}, at(400)))
    idle.applier.apply(at(500))
    assert idle.became() == ["id", "note", "other"]


def test_R12_the_transactions_that_emptied_a_table_are_remembered_by_their_32_bits(pair: Pair) -> None:
    pair.start()
    assert pair.applier.truncates(ITEMS.name) == frozenset()
    rows = pa.concat_batches([batch(ITEMS, [(100, 0)], xid=8).rows, batch(ITEMS, [(200, 0)], xid=(1 << 32) + 9).rows])
    place = rows.schema.get_field_index("_change_type")
    rows = rows.set_column(place, rows.schema.field(place), pa.array(["insert", "truncate"], rows.schema.field(place).type))
    writer = SpoolWriter(pair.root / "other", at(0))
    changes = ChangeBatch(ITEMS, rows, ChangeCounts(inserts=1, truncates=1))
    writer.append(Transactions((changes,), at(200), time_of(200), 2))
    writer.seal()
    writer.close()
    found = SpoolReader(pair.root / "other").read(at(0), at(200)).tables[ITEMS.name]
    pair.follower.follow(pair.sink, pair.target(ITEMS), TableChanges(ITEMS.name, found.slices, found.counts))
    assert pair.applier.truncates(ITEMS.name) == {9}


def test_a_table_that_has_to_be_resynced_again_and_again_fails_instead(pair: Pair) -> None:
    """A cause that a new copy does not remove would have it copied for ever."""
    pair.start()
    resyncs = 0
    while pair.state(ITEMS) is not TableState.FAILED:
        resyncs += 1
        assert resyncs <= error_policy.MOST_RESYNCS + 1
        pair.applier._ledger.write({ITEMS.name: TableStatus(TableState.STREAMING, at(200), at(200))})
        pair.applier.apply(at(500))
    assert resyncs == error_policy.MOST_RESYNCS + 1
    status = pair.applier.statuses[ITEMS.name]
    assert "resynced 20 times within an hour, and again its target cannot be altered in place" in (status.reason or "")
    assert status.remedy
    assert pair.state(ORDERS) is TableState.STREAMING


def test_another_copy_of_a_table_that_was_altered_while_it_was_resynced_waits_for_a_pause(pair: Pair) -> None:
    pair.start()
    shadow = Ledger()
    pair.shadows.begin(ITEMS.name, shadow, at(100))
    shadow.applied[ITEMS.name] = at(200)
    pair.shadows.enter(replace(pair.target(ITEMS), applied=at(200)))
    pair.applier.apply(at(500))
    assert ITEMS.name not in pair.shadows
    assert not pair.shadows.may_begin(ITEMS.name), "not at once"
    assert pair.shadows.is_busy, "a run that is to catch up waits for it"
    now = time.monotonic() + error_policy.LONGEST_SECONDS
    pair.shadows._attempts._clock = lambda: now
    assert pair.shadows.may_begin(ITEMS.name)


@pytest.mark.parametrize("ending", ["removed", "refused", "dropped"])
def test_a_run_does_not_wait_for_another_copy_of_a_table_that_is_not_to_be_resynced_any_more(pair: Pair, ending: str) -> None:
    pair.start()
    shadow = Ledger()
    pair.shadows.begin(ITEMS.name, shadow, at(100))
    shadow.applied[ITEMS.name] = at(200)
    pair.shadows.enter(replace(pair.target(ITEMS), applied=at(200)))
    pair.applier.apply(at(500))
    assert pair.shadows.is_busy
    if ending == "removed":
        pair.applier.leave(ITEMS.name, lambda: pair.shadows.abandon(ITEMS.name))
    elif ending == "dropped":
        pair.applier.lose(ITEMS.name, "it was dropped")
    else:
        pair.applier.give_up_copy(ITEMS.name, "it has no key")
    pair.applier.apply(at(600))
    assert not pair.shadows.is_busy
    assert pair.shadows.may_begin(ITEMS.name), "a later order is not held up by this one"
