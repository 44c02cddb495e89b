"""Workloads of the benchmarks: tables, and the changes made to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCHEMA = "bench"
PUBLICATION = "bench"
TRANSACTION_ROWS = 1000

_SCRIPTS = Path(__file__).parent / "sql"


@dataclass(frozen=True, slots=True)
class Case:
    """`change` is called once in each transaction, with a range of keys; `seed` is called in the same way
    before the slots are created.
    """

    name: str
    title: str
    rows: int
    """Enough to take some seconds to read."""
    script: str
    change: str
    seed: str | None = None

    def load_script(self) -> bytes:
        return (_SCRIPTS / f"{self.script}.sql").read_bytes()


CASES: Sequence[Case] = (
    Case("inserts", "inserts, 10 columns", 1_000_000, "orders", "insert_orders"),
    Case("updates", "updates by key, 10 columns", 300_000, "orders", "update_orders", seed="insert_orders"),
    Case("mix", "inserts, updates and deletes in 5 tables", 300_000, "mix", "change_mix"),
    Case("wide", "inserts, 60 columns", 80_000, "wide", "insert_wide"),
)

BACKLOGS: Sequence[Case] = (
    Case("inserts", "inserts, 10 columns", 1_000_000, "orders", "insert_orders"),
    Case(
        "mixed",
        "inserts, updates and deletes over 1 M keys",
        1_000_000,
        "orders",
        "mix_orders",
        seed="insert_orders",
    ),
    Case("updates", "updates over 1 M keys", 200_000, "orders", "scatter_orders", seed="insert_orders"),
)
"""Workloads that pipelines apply. The table has a million rows or is empty at the start."""
