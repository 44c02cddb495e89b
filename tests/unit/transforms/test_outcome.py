from __future__ import annotations

import pyarrow as pa

from penstock.transforms.apply import REASON, Outcome


def test_an_outcome_counts_its_reasons() -> None:
    outcome = Outcome(pa.table({"id": [1]}), pa.table({"id": [2, 3, 4], REASON: ["a", "b", "a"]}))
    assert outcome.reasons == {"a": 2, "b": 1}
