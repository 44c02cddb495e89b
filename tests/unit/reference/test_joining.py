"""A joined batch of changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pytest
from typing_extensions import override

from penstock.change import CHANGE_TYPE, COMMIT_VERSION, EXACT, EXACT_TYPE, UNCHANGED
from penstock.errors import ReferenceTableError
from penstock.reference.history import ReferenceHistory, row_schema
from penstock.reference.join import Asked, Enrichment, Found, ReferenceFinder

COLUMNS = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string()), pa.field("rate", pa.int64())])


@dataclass(frozen=True)
class HistoryFinder(ReferenceFinder):
    history: ReferenceHistory
    asked: list[Asked] = field(default_factory=list)

    @override
    def find(self, asked: Asked) -> Found:
        self.asked.append(asked)
        places = self.history.find(asked.keys, None)
        return Found(self.history.take(places), places.is_valid())


@pytest.fixture
def finder() -> HistoryFinder:
    history = ReferenceHistory(COLUMNS, ["id"], 0)
    rows = [
        {"id": 1, "name": "one", "rate": 10},
        {"id": 2, "name": None, "rate": None, EXACT: [("rate", "9e99")]},
    ]
    history.load(pa.RecordBatch.from_pylist(rows, row_schema(COLUMNS)))
    return HistoryFinder(history)


def enrichment(finder: ReferenceFinder, *, version: str | None = None) -> Enrichment:
    types = {"c_name": pa.string(), "c_rate": pa.int64()}
    return Enrichment(
        finder, (("customer", "id"),), (("name", "c_name"), ("rate", "c_rate")), types, "found", version
    )


def changes(**columns: Sequence[object]) -> pa.RecordBatch:
    count = len(next(iter(columns.values())))
    types = {
        "customer": pa.int64(),
        CHANGE_TYPE: pa.string(),
        COMMIT_VERSION: pa.int64(),
        UNCHANGED: pa.list_(pa.string()),
        EXACT: EXACT_TYPE,
    }
    arrays = {
        name: pa.array(columns.get(name, [None] * count), arrow_type) for name, arrow_type in types.items()
    }
    return pa.RecordBatch.from_pydict(arrays)


def test_rows_stay_in_order_and_get_the_found_values(finder: HistoryFinder) -> None:
    joined = enrichment(finder).join(changes(customer=[2, 1, None, 3, 1]))
    assert joined.schema.names == [
        "customer",
        CHANGE_TYPE,
        COMMIT_VERSION,
        UNCHANGED,
        EXACT,
        "c_name",
        "c_rate",
        "found",
    ]
    assert joined.column("customer").to_pylist() == [2, 1, None, 3, 1]
    assert joined.column("c_name").to_pylist() == [None, "one", None, None, "one"]
    assert joined.column("found").to_pylist() == [True, True, False, False, True]


def test_text_of_a_value_beyond_its_type_is_kept_under_the_new_name(finder: HistoryFinder) -> None:
    joined = enrichment(finder).join(changes(customer=[1, 2], **{EXACT: [[("note", "x")], [("note", "y")]]}))
    assert joined.column(EXACT).to_pylist() == [[("note", "x")], [("note", "y"), ("c_rate", "9e99")]]


def test_change_that_takes_rows_away_is_passed_on_as_it_is(finder: HistoryFinder) -> None:
    kinds: list[object] = ["delete", "truncate", "insert", "update_postimage", "snapshot"]
    joined = enrichment(finder).join(changes(customer=[1, 1, 1, 1, 1], **{CHANGE_TYPE: kinds}))
    assert joined.column("found").to_pylist() == [False, False, True, True, True]


def test_key_that_did_not_travel_is_not_taken_for_null(finder: HistoryFinder) -> None:
    with pytest.raises(ReferenceTableError, match="customer"):
        enrichment(finder).join(changes(customer=[1, None], **{UNCHANGED: [None, ["customer"]]}))
    enrichment(finder).join(changes(customer=[1, 1], **{UNCHANGED: [None, ["note"]]}))


def test_existing_versions_are_returned_and_none_is_made_up(finder: HistoryFinder) -> None:
    join = enrichment(finder, version=COMMIT_VERSION).join
    join(changes(customer=[1, 2], **{COMMIT_VERSION: [7, 8]}))
    assert finder.asked[-1].versions == [7, 8]
    with pytest.raises(ReferenceTableError, match=COMMIT_VERSION):
        join(changes(customer=[1, 2], **{COMMIT_VERSION: [7, None]}))
