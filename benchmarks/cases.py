"""What is captured in a benchmark: a table, and the changes made to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import LiteralString

TABLE: LiteralString = "bench"
PUBLICATION: LiteralString = "bench"
TRANSACTION_ROWS = 1000

_CREATE: LiteralString = """
    CREATE TABLE bench (
        id bigint PRIMARY KEY,
        quantity int,
        amount numeric(12,2),
        note text,
        created_at timestamptz,
        reference uuid,
        active boolean,
        score double precision,
        day date,
        payload jsonb
    )
"""

_INSERT: LiteralString = """
    INSERT INTO bench
    SELECT i, i %% 1000, (i %% 1000000) / 100.0, 'order number ' || i, '2026-01-01 00:00:00+00'::timestamptz + i * interval '1.000001 s',
           md5(i::text)::uuid, i %% 2 = 0, i / 7.0, '2026-01-01'::date + (i %% 365)::int,
           jsonb_build_object('k', i, 'tag', 'value ' || i %% 10)
    FROM generate_series(%(low)s::bigint, %(high)s::bigint) i
"""

_UPDATE: LiteralString = "UPDATE bench SET quantity = quantity + 1, note = note || '!' WHERE id BETWEEN %(low)s AND %(high)s"


@dataclass(frozen=True, slots=True)
class Case:
    """`change` is run once in each transaction, for the keys from `low` to `high`; `seed` in the same way before the slots are made."""

    name: str
    title: str
    create: LiteralString
    change: LiteralString
    seed: LiteralString | None = None


CASES: Sequence[Case] = (
    Case("inserts", "inserts, 10 columns", _CREATE, _INSERT),
    Case("updates", "updates by key, 10 columns", _CREATE, _UPDATE, seed=_INSERT),
)
