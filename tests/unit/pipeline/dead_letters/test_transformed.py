"""Rows that fail in a transform become dead letters; without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from typing_extensions import override

from penstock.config.policies import RefusedPolicy, SchemaRule
from penstock.errors import RowRefusedError
from penstock.pipeline.dead_letters.queue import DeadLetterQueue
from penstock.pipeline.dead_letters.store import DeadLetterStore
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.pipeline.transform_sink import TransformingSink
from penstock.secret import Secret
from penstock.sinks.modes import Mode
from penstock.transforms.columns import hash_texts
from penstock.transforms.transform import Transform
from tests.support.delta_tables import InlineExecutors
from tests.support.memory_pipeline import ListSink, MemoryPipeline
from tests.support.pipeline.epochs import open_epochs, open_tracker
from tests.support.plain_queries import Made, PlainQuery
from tests.support.sinks.history import PLAIN
from tests.support.sinks.source import NULL, Row, Source, Value

KEY = Secret("k")
TRANSFORM = Transform(hash=("id",), rename={"id": "who"}, cast={"note": "int"}, where="note <> 'no'", key=KEY)


def row(key: int, note: str | None) -> Row:
    return {"id": Value(key), "note": Value(note), "amount": NULL, "seen": NULL, "blob": NULL}


QUERY = PlainQuery(
    {
        "who": "id",
        "note": Made("integer", ("note",), lambda row: None if row["note"] is None else int(row["note"])),
    },
    Made("boolean", ("note", "id"), lambda row: row["note"] != "no" or 1 / (row["id"] - 5) > 1),
)
"""Fails on notes that are not numbers; the filter excludes row 5."""


class TransformedOffice(MemoryPipeline):
    transform = TRANSFORM
    mode = Mode.MIRROR

    @override
    def open(self) -> None:
        if self.sink.table != self.transform.schema(PLAIN):
            self.sink = ListSink(self.transform.schema(PLAIN), self.mode, [], self.source.fence)
        sink = TransformingSink(
            self.sink, lambda _: self.transform, InlineExecutors(), self.root / "staged", QUERY
        )
        self.box = DeadLetterQueue(
            DeadLetterStore(self.root / "lake", "p"),
            InlineExecutors(),
            policy_of=lambda _: self.policy,
            mode_of=lambda _: self.mode,
            reject_inexact=self.refuses and self.mode is Mode.APPEND,
            transform_of=lambda _: self.transform,
            queries=QUERY,
        )
        tracker = open_tracker(SchemaRule(transform=self.transform))
        self.applier = open_epochs(sink, self.root, tracker=tracker, dead_letters=self.box).applier
        target = sink.load_target(PLAIN.name)
        assert target is not None
        self.applier.tables.start(
            {target.table: target},
            {target.table: TableStatus(TableState.CATCHING_UP, target.applied, target.applied)},
        )

    def take(self) -> dict[str | int | None, int | str | None]:
        """Commit, apply and return the rows."""
        position = self.source.commit()
        self.spool(len(self.source.log) - 1, len(self.source.log))
        self.apply(position)
        return {each.get("who"): each["note"] for each in self.sink.list.rows}


@contextmanager
def opened(directory: Path) -> Iterator[TransformedOffice]:
    yield TransformedOffice(directory, Source(PLAIN), Mode.MIRROR, [])


class LogPipeline(TransformedOffice):
    """A log of changes behind a filter."""

    transform = Transform(where="id > 0")
    mode = Mode.APPEND


def hashed(*keys: int) -> list[str]:
    return list(hash_texts(pa.array([str(key) for key in keys]), KEY, pa.int64()).to_pylist())


def test_K12_a_row_that_cannot_be_cast_is_a_dead_letter_and_the_rest_continues(tmp_path: Path) -> None:
    one, two, three = hashed(1, 2, 3)
    with opened(tmp_path) as made:
        for key, note in enumerate(("1", "abc", "no"), 1):
            made.source.insert(row(key, note))
        assert made.take() == {one: 1}
        (letter,) = made.letters()
        assert (letter["code"], letter["change_type"]) == (RowRefusedError.code, "insert")
        assert "cannot be cast to int" in letter["reason"]
        assert '"note":"abc"' in letter["row"].replace(" ", "")

        made.source.update((Value(1),), row(1, "x"))
        made.source.update((Value(3),), row(3, "3"))
        assert made.take() == {one: 1, three: 3}, "a row whose update is refused stays as it was"
        assert len(made.letters()) == 2

        made.source.update((Value(1),), row(1, "no"))
        made.source.update((Value(2),), row(2, "2"))
        assert made.take() == {three: 3, two: 2}, "later changes count, also if the row leaves the filter"
        assert made.letters() == []


def test_K12_a_row_on_which_a_query_fails_is_a_dead_letter_and_the_rest_continues(tmp_path: Path) -> None:
    with opened(tmp_path) as made:
        made.transform = QUERY.transform()
        made.open()
        for key, note in enumerate(("1", "abc", "no", "4", "no"), 1):
            made.source.insert(row(key, note))
        assert made.take() == {1: 1, 4: 4}
        reasons = sorted(letter["reason"] for letter in made.letters())
        assert [
            "'note' cannot be computed" in reasons[0],
            "the filter cannot be evaluated" in reasons[1],
        ] == [True, True]

        made.source.update((Value(1),), row(1, "x"))
        made.source.update((Value(2),), row(2, "2"))
        made.source.delete((Value(5),))
        assert made.take() == {1: 1, 2: 2, 4: 4}
        assert len(made.letters()) == 1
        assert not list((tmp_path / "lake").rglob("asked/*")), "the staged keys are deleted"

        made.box.order_replay(PLAIN.name)
        made.apply(made.idle())
        assert len(made.letters()) == 1


def test_a_replay_under_the_same_transform_keeps_its_dead_letters(tmp_path: Path) -> None:
    with opened(tmp_path) as made:
        made.source.insert(row(1, "abc"))
        assert made.take() == {}
        made.box.order_replay(PLAIN.name)
        made.apply(made.idle())
        assert len(made.letters()) == 1
        assert made.sink.list.rows == []


def test_by_default_a_row_that_cannot_be_transformed_stops_its_table(tmp_path: Path) -> None:
    with opened(tmp_path) as made:
        made.policy = RefusedPolicy.STOP
        made.source.insert(row(1, "abc"))
        made.take()
        status = made.applier.tables.statuses[PLAIN.name]
        assert status.state is TableState.FAILED
        assert RowRefusedError.code in (status.reason or "")
        assert "abc" not in (status.reason or "")


def test_K12_a_dead_letter_is_replayed_once_its_row_can_be_transformed(tmp_path: Path) -> None:
    """It is older than the target's row and must not be taken for it."""
    with opened(tmp_path) as made:
        made.transform = Transform(where="amount > 3")
        made.open()
        made.source.insert({**row(1, "a"), "amount": Value(None, "1e50")})
        made.source.insert({**row(2, "b"), "amount": Value(Decimal(5))})
        made.take()
        assert [each["id"] for each in made.sink.list.rows] == [2]
        made.transform = Transform(where="id = 1")
        made.box.order_replay(PLAIN.name)
        made.apply(made.idle())
        assert sorted(each["id"] for each in made.sink.list.rows) == [1, 2]
        assert made.letters() == []


BEYOND = Value(None, "1e50")


def logged(made: LogPipeline) -> list[tuple[object, ...]]:
    """The notes in the log: the last values of the row, and unchanged TOAST."""
    return [(each["amount"], each["note"], each["_unchanged"]) for each in made.sink.list.rows]


@pytest.fixture
def log(tmp_path: Path) -> LogPipeline:
    made = LogPipeline(tmp_path, Source(PLAIN), Mode.APPEND, [])
    made.source.insert({**row(1, "first"), "amount": Value(Decimal(1))})
    made.take()
    return made


def change(made: LogPipeline, amount: int | None, note: str | None = None) -> None:
    """A change of row 1; without amount: a rejected one; without note: the note is unchanged TOAST."""
    values = {"amount": BEYOND if amount is None else Value(Decimal(amount))}
    made.source.update(
        (Value(1),),
        values if note is None else {**values, "note": Value(note)},
        [] if note is not None else ["note"],
    )


def test_K12_a_missing_value_of_a_change_is_not_taken_from_before_a_rejected_one(log: LogPipeline) -> None:
    change(log, 2, "second")
    change(log, None, "third")
    change(log, 4)
    change(log, 5, "fifth")
    change(log, 6)
    log.take()
    one, two, five, six = (Decimal(number) for number in (1, 2, 5, 6))
    assert logged(log) == [
        (one, "first", None),
        (two, "second", None),
        (five, "fifth", None),
        (six, "fifth", None),
    ]
    assert [letter["code"] for letter in log.letters()] == ["PEN-1411", "PEN-1414"]


def test_K12_a_missing_value_of_a_change_is_not_taken_from_a_late_dead_letter(log: LogPipeline) -> None:
    change(log, None, "second")
    change(log, 3, "third")
    log.take()
    log.refuses = False
    log.open()
    log.box.order_replay(PLAIN.name)
    change(log, 4)
    change(log, 5, "fifth")
    change(log, 6)
    log.take()
    numbers = [Decimal(number) for number in (1, 3, 5, 6)]
    found = [each for each in logged(log) if each[0] is not None]
    assert found == list(zip(numbers, ("first", "third", "fifth", "fifth"), (None,) * 4, strict=True))
    assert [letter["code"] for letter in log.letters()] == ["PEN-1414"]
    log.box.order_replay(PLAIN.name)
    log.apply(log.idle())
    assert log.letters() == []
    assert logged(log)[-1] == (Decimal(4), None, ["note"]), "it records what it lacks"


def test_K12_a_row_with_a_new_key_still_lacks_its_missing_values(log: LogPipeline) -> None:
    change(log, None, "second")
    log.source.update((Value(1),), {"id": Value(2), "amount": Value(Decimal(3))}, ["note"])
    log.take()
    assert [letter["code"] for letter in log.letters()] == ["PEN-1411", "PEN-1414"]
    assert all(each[1] in ("first", None) for each in logged(log))
