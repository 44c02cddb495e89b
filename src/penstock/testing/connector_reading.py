"""The rules of `SourceConnector` about reading: its lifecycle, its batches, and its checkpoints."""

from __future__ import annotations

from penstock.contracts.connector import SourceCheckpoint
from penstock.testing.connector_harness import (
    MAX_RECORDS,
    ConnectorHarness,
    Row,
    apply_next,
    check_nothing_else,
    check_plain,
    check_refused,
    opened,
    take,
    until_none,
)
from penstock.testing.rules import rule
from penstock.testing.streams import Background, wait_for

DOCUMENT = "source_connector"


class ConnectorReading:
    """Run them by `SourceConnectorConformance`, which has the others too."""

    # --- lifecycle ------------------------------------------------------------------------------------------------------

    @rule(DOCUMENT, "lifecycle", "open-once", "open()", "close()")
    def test_nothing_can_be_read_before_open_and_after_close(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        connector = harness.connector()
        check_refused(lambda: connector.poll_batch(1), "polling before open")
        connector.open(harness.config())
        check_refused(lambda: connector.open(harness.config()), "opening twice")
        take(harness, connector, 1)
        connector.close()
        check_refused(lambda: connector.poll_batch(1), "polling after close")

    @rule(DOCUMENT, "lifecycle", "close()")
    def test_closing_releases_everything_and_may_be_repeated(self, harness: ConnectorHarness) -> None:
        harness.connector().close()
        before = harness.open_resources()
        harness.add((1, "x"))
        connector = harness.connector()
        connector.open(harness.config())
        take(harness, connector, 1)
        connector.close()
        connector.close()
        wait_for(lambda: harness.open_resources() == before, f"as before, {before},", harness.open_resources, harness.deadline_seconds)

    @rule(DOCUMENT, "close()")
    def test_closing_what_was_never_read_releases_everything(self, harness: ConnectorHarness) -> None:
        before = harness.open_resources()
        connector = harness.connector()
        connector.open(harness.config())
        connector.close()
        wait_for(lambda: harness.open_resources() == before, f"as before, {before},", harness.open_resources, harness.deadline_seconds)

    # --- polling --------------------------------------------------------------------------------------------------------

    @rule(DOCUMENT, "external", "lifecycle", "poll_batch()")
    def test_every_row_comes_once_and_in_order(self, harness: ConnectorHarness) -> None:
        rows: list[Row] = [(-1, "negative"), (0, ""), (1, None), (2, "NULL"), (3, "\N{SNOWMAN}\n")]
        harness.add(*rows[:3])
        with opened(harness) as connector:
            target = take(harness, connector, 3)
            harness.add(rows[3])
            harness.add(rows[4])
            assert target + take(harness, connector, 2) == rows
            check_nothing_else(harness, connector)

    @rule(DOCUMENT, "poll-none", "poll_batch()")
    @rule("mistakes", "first-empty-poll")
    def test_none_means_nothing_now_and_never_the_end(self, harness: ConnectorHarness) -> None:
        with opened(harness) as connector:
            for each in range(3):
                until_none(harness, connector)
                harness.add((each, "x"))
                assert take(harness, connector, 1) == [(each, "x")]

    @rule(DOCUMENT, "poll-none")
    def test_polling_does_not_wait_for_rows(self, harness: ConnectorHarness) -> None:
        with opened(harness) as connector:
            until_none(harness, connector)
            polled = Background(lambda: connector.poll_batch(MAX_RECORDS)).result(
                harness.deadline_seconds, "an answer although there is nothing"
            )
            assert polled is None

    @rule(DOCUMENT, "max-records")
    def test_no_row_is_lost_to_the_number_that_is_asked_for(self, harness: ConnectorHarness) -> None:
        rows: list[Row] = [(each, f"note {each}") for each in range(10)]
        harness.add(*rows[:6])
        with opened(harness) as connector:
            target: list[Row] = []
            for max_records in (1, 3, 2):
                apply_next(harness, connector, target, max_records)
            harness.add(*rows[6:])
            while len(target) < len(rows):
                apply_next(harness, connector, target, 1)
            assert target == rows

    # --- checkpoints ----------------------------------------------------------------------------------------------------

    @rule(DOCUMENT, "checkpoint()")
    def test_a_checkpoint_is_plain_and_survives_as_text(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            check_plain(connector.checkpoint())
            take(harness, connector, 1)
            check_plain(connector.checkpoint())

    @rule(DOCUMENT, "checkpoint()")
    def test_taking_a_checkpoint_has_no_effect(self, harness: ConnectorHarness) -> None:
        rows: list[Row] = [(each, "x") for each in range(4)]
        harness.add(*rows[:2])
        with opened(harness) as connector:
            target = take(harness, connector, 2)
            until_none(harness, connector)
            acknowledged = harness.acknowledged()
            taken = [connector.checkpoint() for _ in range(3)]
            assert taken[0] == taken[1] == taken[2], "nothing was read in between, so it is one place"
            harness.add(*rows[2:])
            assert target + take(harness, connector, 2) == rows
            assert harness.acknowledged() == acknowledged, "a checkpoint acknowledges nothing: nobody knows whether it will be stored"

    @rule(DOCUMENT, "checkpoint-enough", "restore()", "lifecycle")
    def test_every_checkpoint_is_enough_to_go_on_from(self, harness: ConnectorHarness) -> None:
        """In ever longer runs: a source that must begin again with what was there at first gets on all the same."""
        rows: list[Row] = [(each, f"note {each}") for each in range(5)]
        harness.add(*rows)
        target: list[Row] = []
        stored: SourceCheckpoint | None = None
        for batches in range(1, 10):
            with opened(harness, stored) as connector:
                for _ in range(batches):
                    if len(target) < len(rows):
                        apply_next(harness, connector, target, 2)
                stored = SourceCheckpoint.from_json(connector.checkpoint().to_json())
            if len(target) >= len(rows):
                break
        assert target == rows, "nothing is missing, and nothing comes twice"
        harness.add((99, "mark"))
        with opened(harness, stored) as connector:
            assert take(harness, connector, 1) == [(99, "mark")]

    @rule(DOCUMENT, "checkpoint-enough", "restore()")
    def test_what_is_added_later_goes_on_from_any_checkpoint_too(self, harness: ConnectorHarness) -> None:
        rows: list[Row] = [(each, f"note {each}") for each in range(8)]
        harness.add(rows[0])
        target: list[Row] = []
        with opened(harness) as connector:
            while not target:
                apply_next(harness, connector, target)
            stored = connector.checkpoint()
        harness.add(*rows[1:6])
        harness.add(*rows[6:])
        for _ in rows:
            if len(target) < len(rows):
                with opened(harness, stored) as connector:
                    apply_next(harness, connector, target, 2)
                    stored = SourceCheckpoint.from_json(connector.checkpoint().to_json())
        assert target == rows, "nothing is missing, and nothing comes twice, be it in the middle of a transaction"

    @rule(DOCUMENT, "checkpoint-enough", "restore()")
    def test_the_beginning_is_a_checkpoint_too(self, harness: ConnectorHarness) -> None:
        with opened(harness) as connector:
            unread = connector.checkpoint()
        rows: list[Row] = []
        for beginning in (SourceCheckpoint(), unread):
            rows.append((len(rows), "x"))
            harness.add(rows[-1])
            expected = rows if harness.replays else rows[-1:]
            with opened(harness, beginning) as connector:
                assert take(harness, connector, len(expected)) == expected

    @rule(DOCUMENT, "restore-first", "restore()")
    @rule("mistakes", "reader-before-restore")
    def test_a_checkpoint_counts_although_the_connector_is_open_already(self, harness: ConnectorHarness) -> None:
        harness.add((1, "before"))
        with opened(harness) as connector:
            take(harness, connector, 1)
            stored = connector.checkpoint()
        connector = harness.connector()
        connector.open(harness.config())
        try:
            # Whoever begins to read in open() has the first row on its way by now.
            harness.add((2, "after"))
            connector.restore(stored)
            assert take(harness, connector, 1) == [(2, "after")]
        finally:
            connector.close()

    @rule(DOCUMENT, "restore-first", "restore()")
    def test_a_checkpoint_comes_too_late_once_reading_has_started(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            take(harness, connector, 1)
            stored = connector.checkpoint()
            check_refused(lambda: connector.restore(stored), "restoring after polling")
            harness.add((2, "x"))
            assert take(harness, connector, 1) == [(2, "x")], "a refused checkpoint changes nothing"

    @rule(DOCUMENT, "checkpoint-enough")
    def test_right_after_restore_the_place_is_the_one_of_the_checkpoint(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            take(harness, connector, 1)
            stored = connector.checkpoint()
        with opened(harness, stored) as connector:
            assert connector.checkpoint() == stored
            harness.add((2, "x"))
            take(harness, connector, 1)
            assert connector.checkpoint().epoch > stored.epoch, "epochs go on, so that none is taken for an earlier one"

    @rule(DOCUMENT, "restore()")
    def test_a_checkpoint_of_something_else_is_refused(self, harness: ConnectorHarness) -> None:
        connector = harness.connector()
        connector.open(harness.config())
        foreign = SourceCheckpoint({"nothing of yours": "no offset"}, 7, {"of": "somebody else"})
        check_refused(lambda: connector.restore(foreign), "a checkpoint that no connector of this kind wrote")
        connector.close()

    @rule(DOCUMENT, "replay", "no-replay", "supports_replay()")
    def test_what_was_not_made_durable_comes_again_or_the_connector_says_that_it_cannot(self, harness: ConnectorHarness) -> None:
        harness.add((1, "x"))
        with opened(harness) as connector:
            assert connector.supports_replay() == harness.replays
            take(harness, connector, 1)
            stored = connector.checkpoint()
            harness.add((2, "given out, not durable"))
            take(harness, connector, 1)
        harness.add((3, "x"))
        with opened(harness, stored) as connector:
            expected: list[Row] = [(2, "given out, not durable"), (3, "x")] if harness.replays else [(3, "x")]
            assert take(harness, connector, len(expected)) == expected
