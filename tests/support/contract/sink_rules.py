"""The rules of `Sink` for every mirror, as tests for any sink: provide a `SinkHarness` as the fixture
`harness`.
"""

from __future__ import annotations

import pytest

from penstock.errors import (
    PenstockError,
    Recovery,
    SchemaChangedError,
    TableRewrittenError,
    TargetForeignError,
    TargetRewoundError,
)
from penstock.position import Position
from penstock.schema import Column, TableSchema
from tests.support.contract.sink_harness import ITEMS, SinkHarness
from tests.support.sinks.source import Value


class SinkRules:
    """Every rule has a test, named after it."""

    # snapshots
    # --------------------------------------------------------------------------------------------------------

    def test_nothing_exists_before_a_snapshot_is_begun(self, harness: SinkHarness) -> None:
        assert harness.sink.load_target(ITEMS) is None

    def test_a_table_that_is_begun_has_no_position_and_shows_no_row(self, harness: SinkHarness) -> None:
        place = harness.begin()
        harness.write(place, 0, harness.source.sorted_rows())
        assert harness.target().applied is None
        assert harness.rows() == []

    def test_a_finished_snapshot_is_all_its_chunks_at_its_fence(self, harness: SinkHarness) -> None:
        harness.copy()
        target = harness.target()
        assert (target.applied, target.key, target.source_oid) == (harness.fence, ("id",), harness.table.oid)
        assert target.schema.names == ["id", "note", "size"]
        assert harness.rows() == harness.source.sorted_rows()

    def test_an_empty_table_is_copied_too(self, harness: SinkHarness) -> None:
        place = harness.begin()
        harness.sink.finish_snapshot(harness.table, [harness.write(place, 0, [])[0]], harness.fence)
        assert (harness.target().applied, harness.rows()) == (harness.fence, [])

    def test_N03_a_snapshot_resumes_in_another_process_with_the_existing_chunks(
        self, harness: SinkHarness
    ) -> None:
        rows = harness.source.sorted_rows()
        place = harness.begin()
        first, _ = harness.write(place, 0, rows[:5])
        harness.sink.close()
        harness.sink = harness.open()
        assert harness.sink.can_resume_snapshot(harness.table, place, [first])
        second, _ = harness.write(place, 1, rows[5:])
        harness.sink.finish_snapshot(harness.table, [first, second], harness.fence)
        assert harness.rows() == rows

    def test_N03_a_restarted_snapshot_has_no_rows_of_the_one_before(self, harness: SinkHarness) -> None:
        rows = harness.source.sorted_rows()
        old = harness.begin()
        lost, _ = harness.write(old, 0, rows)
        place = harness.begin()
        assert not harness.sink.can_resume_snapshot(harness.table, old, [lost])
        file, _ = harness.write(place, 0, rows[:2])
        harness.sink.finish_snapshot(harness.table, [file], harness.fence)
        assert harness.rows() == rows[:2]

    def test_a_finished_snapshot_cannot_be_finished_again_nor_resumed(self, harness: SinkHarness) -> None:
        place = harness.begin()
        file, _ = harness.write(place, 0, harness.source.sorted_rows())
        harness.sink.finish_snapshot(harness.table, [file], harness.fence)
        assert not harness.sink.can_resume_snapshot(harness.table, place, [file])
        with pytest.raises(TableRewrittenError):
            harness.sink.finish_snapshot(harness.table, [file], harness.fence)
        assert harness.rows() == harness.source.sorted_rows()

    # epochs
    # --------------------------------------------------------------------------------------------------------

    def test_K01_a_repeated_epoch_and_an_older_one_change_nothing(self, harness: SinkHarness) -> None:
        harness.copy()
        begun = harness.target()
        harness.source.insert(harness.item(20))
        first = harness.follow()
        harness.source.update(harness.at(20), {"note": Value("second")})
        harness.source.delete(harness.at(1))
        second = harness.follow()
        shown = harness.rows()
        for start, end in ((harness.fence, first), (first, second), (harness.fence, second)):
            harness.apply(start, end, begun)  # with the state that a caller had before it lost the replies
        assert (harness.rows(), harness.target().applied) == (shown, second)

    def test_K01_only_the_new_part_of_a_longer_epoch_counts(self, harness: SinkHarness) -> None:
        harness.copy()
        begun = harness.target()
        harness.source.insert(harness.item(20))
        harness.follow()
        harness.source.insert(harness.item(21))
        end = harness.commit()
        harness.apply(harness.fence, end, begun)
        assert (harness.target().applied, len(harness.rows())) == (end, 11)

    def test_K01_an_epoch_whose_changes_are_all_there_moves_the_position_alone(
        self, harness: SinkHarness
    ) -> None:
        harness.copy()
        harness.source.insert(harness.item(20))
        end = harness.follow()
        further = Position.of(end.value + 5)
        shown = harness.rows()
        harness.sink.apply(harness.target(), harness.changes(harness.fence, end), further)
        assert (harness.rows(), harness.target().applied) == (shown, further)

    def test_an_epoch_that_dies_before_it_counts_leaves_nothing_and_is_done_by_the_next_attempt(
        self, harness: SinkHarness
    ) -> None:
        harness.copy()
        harness.source.insert(harness.item(20))
        harness.source.insert(harness.item(21))
        end = harness.commit()
        shown, target = harness.rows(), harness.target()
        with harness.dying(), pytest.raises(PenstockError) as died:
            harness.apply(harness.fence, end)
        assert died.value.recovery is Recovery.RETRY
        assert (harness.rows(), harness.target().applied) == (shown, harness.fence)
        harness.apply(harness.fence, end, target)
        assert (len(harness.rows()), harness.target().applied) == (len(shown) + 2, end)

    def test_an_epoch_whose_answer_is_lost_is_not_applied_again(self, harness: SinkHarness) -> None:
        harness.copy()
        harness.source.insert(harness.item(20))
        end = harness.commit()
        target = harness.target()
        with harness.unanswered(), pytest.raises(PenstockError) as lost:
            harness.apply(harness.fence, end)
        assert lost.value.recovery is Recovery.RETRY
        shown = harness.rows()
        harness.apply(harness.fence, end, target)
        assert (harness.rows(), harness.target().applied) == (shown, end)

    def test_an_epoch_of_another_shape_is_refused_and_leaves_the_table_as_it_was(
        self, harness: SinkHarness
    ) -> None:
        harness.copy()
        harness.source.insert(harness.item(20))
        end = harness.commit()
        target = harness.target()
        recreated = TableSchema(harness.table.oid + 1, ITEMS, harness.table.columns, harness.table.key)
        slices = harness.changes(harness.fence, end)
        harness.sink.drop(ITEMS)
        place = harness.sink.begin_snapshot(recreated, harness.fence)
        harness.sink.finish_snapshot(recreated, [harness.write(place, 0, [])[0]], harness.fence)
        with pytest.raises(SchemaChangedError):
            harness.sink.apply(target, slices, end)
        assert harness.rows() == []

    def test_K09_a_table_that_is_gone_is_not_written_to(self, harness: SinkHarness) -> None:
        harness.copy()
        target = harness.target()
        harness.sink.drop(ITEMS)
        harness.source.insert(harness.item(20))
        end = harness.commit()
        with pytest.raises(TargetRewoundError):
            harness.apply(harness.fence, end, target)
        assert harness.sink.load_target(ITEMS) is None

    # ownership
    # --------------------------------------------------------------------------------------------------------

    def test_K10_tables_of_another_pipeline_are_refused(self, harness: SinkHarness) -> None:
        harness.copy()
        other = harness.open("other")
        with pytest.raises(TargetForeignError) as refused:
            other.load_target(ITEMS)
        assert refused.value.recovery is Recovery.OPERATOR
        assert refused.value.hint
        with pytest.raises(TargetForeignError):
            other.begin_snapshot(harness.table, harness.fence)
        other.close()
        assert harness.rows() == harness.source.sorted_rows()

    def test_K10_tables_of_other_programs_are_refused(self, harness: SinkHarness) -> None:
        harness.put_foreign()
        for attempt in (lambda: harness.sink.load_target(ITEMS), harness.begin):
            with pytest.raises(TargetForeignError):
                attempt()

    def test_K10_tables_of_other_programs_are_replaced_if_configured(self, harness: SinkHarness) -> None:
        harness.put_foreign()
        harness.sink.remove_foreign(ITEMS)
        assert harness.sink.load_target(ITEMS) is None
        harness.copy()
        assert harness.rows() == harness.source.sorted_rows()

    # --- dropped tables ---

    def test_a_disowned_table_keeps_its_rows_and_is_resynced(self, harness: SinkHarness) -> None:
        harness.copy()
        harness.sink.release_ownership(ITEMS)
        assert harness.target().applied is None
        assert harness.rows() == harness.source.sorted_rows()
        harness.copy()
        assert harness.rows() == harness.source.sorted_rows()

    def test_a_dropped_table_is_gone(self, harness: SinkHarness) -> None:
        harness.copy()
        harness.sink.drop(ITEMS)
        assert harness.sink.load_target(ITEMS) is None
        harness.copy()
        assert harness.rows() == harness.source.sorted_rows()


class MirrorRules(SinkRules):
    """Problems that a sink reports if its tables equal the source."""

    def test_K02_the_last_change_of_each_key_counts(self, harness: SinkHarness) -> None:
        harness.copy()
        source = harness.source
        source.delete(harness.at(1))
        source.insert(harness.item(1, "again"))
        source.update(harness.at(2), {"note": Value(None)})
        source.insert(harness.item(30))
        source.delete(harness.at(30))
        source.update(harness.at(3), {"id": harness.value(40)})
        source.update(harness.at(4), {"id": harness.value(3)})
        harness.follow()
        assert harness.rows() == source.sorted_rows()

    def test_R12_an_epoch_with_a_truncate_keeps_later_rows(self, harness: SinkHarness) -> None:
        harness.copy()
        harness.source.insert(harness.item(20))
        harness.source.truncate()
        harness.source.insert(harness.item(1, "after"))
        harness.follow()
        assert harness.rows() == [harness.item(1, "after")]
        harness.source.truncate()
        end = harness.follow()
        assert (harness.rows(), harness.target().applied) == ([], end)

    def test_K04_K05_unchanged_toast_is_the_target_s_own_value(self, harness: SinkHarness) -> None:
        harness.copy()
        source = harness.source
        source.update(harness.at(1), {"size": Value("7")}, ["note"])
        source.update(harness.at(2), {"id": harness.value(50)}, ["note"])
        source.update(harness.at(3), {"note": Value("set")})
        source.update(harness.at(3), {"size": Value("8")}, ["note"])
        harness.follow()
        assert harness.rows() == source.sorted_rows()

    def test_a_shadow_takes_the_table_s_place_with_its_position(self, harness: SinkHarness) -> None:
        harness.copy()
        shadow = harness.sink.shadow("c0ffee")
        main, harness.sink = harness.sink, shadow
        harness.source.fence = harness.source.position
        harness.source.states[harness.source.fence] = rows = [harness.item(1, "again")]
        harness.copy()
        harness.sink = main
        assert len(harness.rows()) == 9
        copy, former = (
            found.copy for found in (shadow.load_target(ITEMS), main.load_target(ITEMS)) if found is not None
        )
        assert copy not in (None, former), "the identity of the copy differs, even at the same position"
        main.replace(ITEMS, shadow, Position.of(harness.source.fence + 3))
        assert (harness.rows(), harness.target().applied) == (rows, Position.of(harness.source.fence + 3))
        assert harness.target().copy == copy
        shadow.drop(ITEMS)
        assert harness.rows() == rows
        main.drop_shadows()
        assert harness.rows() == rows

    def test_a_swap_applies_changes_from_before_and_after_its_preparation_and_writes_no_rows(
        self, harness: SinkHarness
    ) -> None:
        harness.copy()
        source, main, before = harness.source, harness.sink, harness.rows()
        shadow = harness.sink = main.shadow("c0ffee")
        harness.copy()
        source.update(harness.at(1), {"note": Value("before")})
        source.delete(harness.at(2))
        harness.follow()
        main.prepare_replace(ITEMS, shadow)
        assert harness.rows() == before
        source.update(harness.at(1), {"note": Value("after")})
        source.delete(harness.at(3))
        source.insert(harness.item(2, "again"))
        end = harness.follow()
        written = harness.row_files()
        main.replace(ITEMS, shadow, end)
        assert {*harness.row_files().values()} == {*written.values()}, "only links were made"
        assert harness.rows() == source.sorted_rows()
        main.cancel_replace(ITEMS, shadow)
        shadow.drop(ITEMS)
        harness.sink = main
        assert (harness.rows(), harness.target().applied) == (source.sorted_rows(), end)
        source.update(harness.at(1), {"id": harness.value(50)}, ["note"])
        source.delete(harness.at(4))
        harness.follow()
        assert harness.rows() == source.sorted_rows()

    def test_K01_a_swap_that_is_prepared_and_never_made_leaves_the_table_as_it_was_and_nothing_beside_it(
        self, harness: SinkHarness
    ) -> None:
        harness.copy()
        before, files = harness.rows(), harness.row_files().keys()
        for is_killed in (False, True):
            main = harness.sink
            shadow = harness.sink = main.shadow(f"copy{is_killed:d}")
            harness.copy()
            harness.source.update(harness.at(1), {"note": Value(f"changed {is_killed}")})
            harness.follow()
            main.prepare_replace(ITEMS, shadow)
            if is_killed:
                main.close()
                main = harness.open()
            else:
                main.cancel_replace(ITEMS, shadow)
                shadow.drop(ITEMS)
            harness.sink = main
            main.drop_shadows()
            assert (harness.rows(), harness.row_files().keys()) == (before, files)

    def test_a_small_table_is_read_without_spark_as_it_was_at_a_position(self, harness: SinkHarness) -> None:
        harness.copy()
        source, sink = harness.source, harness.sink
        source.update(harness.at(1), {"note": Value(None)})
        source.delete(harness.at(2))
        ends = [harness.follow()]
        source.update(harness.at(1), {"id": harness.value(40)})
        source.insert(harness.item(2, "again"))
        ends.append(harness.follow())
        assert sink.version_at(ITEMS, ends[-1]) is not None
        for end in ends:
            version = sink.version_at(ITEMS, end)
            if version is not None:  # Postgres has only the current version
                found = sink.read_small(ITEMS, version, 1 << 20)
                assert found is not None
                rows = [
                    {name: Value(row[name]) for name in ("id", "note", "size")} for row in found.to_pylist()
                ]
                assert sorted(rows, key=repr) == sorted(source.states[end.value], key=repr)
        assert sink.read_small(ITEMS, None, 10) is None, "it is larger than that"


class LoadingRules:
    """For sinks that send a chunk's rows to a server, which may reject them. Files take any value."""

    def test_an_error_shows_no_row_values(self, harness: SinkHarness) -> None:
        columns = (*harness.table.columns[:2], Column("size", harness.types[2], 23))
        table = TableSchema(harness.table.oid, ITEMS, columns, ("id",))
        place = harness.sink.begin_snapshot(table, harness.fence)
        with pytest.raises(PenstockError) as refused:
            harness.write(place, 0, [harness.item(1, "a note", "secret")])
        assert "secret" not in str(refused.value)
        assert "a note" not in str(refused.value)
