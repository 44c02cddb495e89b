"""Rows that cannot be transformed, put aside as letters; without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
from typing_extensions import override

from penstock.errors import RowRefusedError
from penstock.pipeline.apply import EpochApplier
from penstock.pipeline.epochs import EpochLog
from penstock.pipeline.letter_box import LetterBox
from penstock.pipeline.letter_store import LetterStore
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.refused_policy import RefusedPolicy
from penstock.pipeline.states import TableState, TableStatus
from penstock.pipeline.transforming import TransformingSink
from penstock.secret import Secret
from penstock.sinks.layout import Mode
from penstock.transforms.hashing import hash_texts
from penstock.transforms.transform import Transform
from tests.delta_tables import InlineExecutors
from tests.integration.sinks.history import PLAIN
from tests.integration.sinks.source import NULL, Row, Source, Value
from tests.letter_office import ListSink, Office
from tests.plain_queries import Made, PlainQuery

KEY = Secret("k")
TRANSFORM = Transform(hash=("id",), rename={"id": "who"}, cast={"note": "int"}, where="note <> 'no'", key=KEY)


def row(key: int, note: str | None) -> Row:
    return {"id": Value(key), "note": Value(note), "amount": NULL, "seen": NULL, "blob": NULL}


QUERY = PlainQuery(
    {"who": "id", "note": Made("integer", ("note",), lambda row: None if row["note"] is None else int(row["note"]))},
    Made("boolean", ("note", "id"), lambda row: row["note"] != "no" or 1 / (row["id"] - 5) > 1),
)
"""Fails on notes that are no numbers; the filter, on what is not wanted of row 5."""


class TransformedOffice(Office):
    transform = TRANSFORM

    @override
    def open(self) -> None:
        self.sink = ListSink(self.transform.schema(PLAIN), Mode.MIRROR, [], self.source.fence)
        sink = TransformingSink(self.sink, lambda _: self.transform, InlineExecutors(), self.root / "staged", QUERY)
        self.box = LetterBox(
            LetterStore(self.root / "lake", "p"),
            InlineExecutors(),
            policy_of=lambda _: self.policy,
            mode_of=lambda _: Mode.MIRROR,
            refuse_inexact=False,
            transform_of=lambda _: self.transform,
            queries=QUERY,
        )
        log, observer = EpochLog(self.root / "lake", "p"), PipelineObserver()
        self.applier = EpochApplier(sink, log, self.root / "spool", consumer="p", system="1/1", observer=observer, letters=self.box)
        target = sink.load_target(PLAIN.name)
        assert target is not None
        self.applier.adopt({target.table: target}, {target.table: TableStatus(TableState.CATCHING_UP, target.applied, target.applied)})

    def take(self) -> dict[str | int | None, int | str | None]:
        """Commit, apply, and look."""
        position = self.source.commit()
        self.spool(len(self.source.log) - 1, len(self.source.log))
        self.apply(position)
        return {each.get("who"): each["note"] for each in self.sink.list.rows}


@contextmanager
def opened(directory: Path) -> Iterator[TransformedOffice]:
    yield TransformedOffice(directory, Source(PLAIN), Mode.MIRROR, [])


def hashed(*keys: int) -> list[str]:
    return list(hash_texts(pa.array([str(key) for key in keys]), KEY, pa.int64()).to_pylist())


def test_K12_a_row_that_cannot_be_cast_is_a_letter_and_the_rest_goes_on(tmp_path: Path) -> None:
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
        assert made.take() == {three: 3, two: 2}, "what comes later counts, also if it leaves the filter"
        assert made.letters() == []


def test_K12_a_row_on_which_a_query_fails_is_a_letter_and_the_rest_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path) as made:
        made.transform = QUERY.transform()
        made.open()
        for key, note in enumerate(("1", "abc", "no", "4", "no"), 1):
            made.source.insert(row(key, note))
        assert made.take() == {1: 1, 4: 4}
        reasons = sorted(letter["reason"] for letter in made.letters())
        assert ["'note' cannot be worked out" in reasons[0], "the filter cannot be worked out" in reasons[1]] == [True, True]

        made.source.update((Value(1),), row(1, "x"))
        made.source.update((Value(2),), row(2, "2"))
        made.source.delete((Value(5),))
        assert made.take() == {1: 1, 2: 2, 4: 4}
        assert len(made.letters()) == 1
        assert not list((tmp_path / "lake").rglob("asked/*")), "what was asked is gone"

        made.box.order_replay(PLAIN.name)
        made.apply(made.idle())
        assert len(made.letters()) == 1


def test_a_replay_under_the_same_transform_keeps_its_letters(tmp_path: Path) -> None:
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
        status = made.applier.statuses[PLAIN.name]
        assert status.state is TableState.FAILED
        assert RowRefusedError.code in (status.reason or "")
        assert "abc" not in (status.reason or "")


def test_K12_a_letter_is_replayed_once_its_row_can_be_transformed(tmp_path: Path) -> None:
    """It is older than what the target has, and must not be taken for something that it has."""
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
