"""One column of each kind, and what each transform makes of it."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa

COLUMNS = {
    "n": pa.array([1, 5, None, -3, 5], pa.int32()),
    "big": pa.array([2**60, 1, 2, 3, None], pa.int64()),
    "d": pa.array(
        [Decimal("1.50"), Decimal("5.00"), None, Decimal("0.01"), Decimal("-1.00")], pa.decimal128(10, 2)
    ),
    "f": pa.array([float("nan"), 1.5, None, -0.0, float("inf")], pa.float64()),
    "s": pa.array(["EU", "a%b", None, "line\nbreak", "Ü"], pa.string()),
    "b": pa.array([True, False, None, True, False]),
    "day": pa.array([date(2024, 1, 1), date(2024, 12, 31), None, date(1, 1, 1), date(2025, 1, 1)]),
    "at": pa.array([datetime(2024, 1, 1, 12, tzinfo=UTC), None, None, None, None], pa.timestamp("us", "UTC")),
    "list": pa.array([[1], [], None, [None], [2]], pa.list_(pa.int32())),
    "Odd name": pa.array([1, 2, 3, 4, 5]),
}


# The results of Spark 4.1; tests/integration/pipeline/test_transforms.py checks them.
ANSWERS = {
    "n = 5": "ftnft",
    "n <> 5": "tfntf",
    "5 < n OR n < 0": "ffntf",
    "n < 5.5": "ttntt",
    "d > 1": "ttnff",
    "d = 1.5": "tfnff",
    "d >= n": "ttntf",
    "big > 1152921504606846975": "tfffn",
    "f > 1000000.0": "tfnft",
    "f = f": "ttntt",
    "f < 0.5": "ffntf",
    "f = 0": "ffntf",
    "s = 'EU'": "tfnff",
    's = "EU"': "tfnff",
    "s < 'a'": "tfnff",
    "s LIKE 'E_'": "tfnff",
    "s LIKE '%break'": "ffntf",
    "s LIKE '_'": "ffnft",
    "s NOT LIKE '%U'": "ftntt",
    "b": "tfntf",
    "NOT b": "ftnft",
    "b AND n = 1": "tfnff",
    "b OR n = 5": "ttntt",
    "b IS TRUE": "tfftf",
    "b IS NOT FALSE": "tfttf",
    "n IS NULL": "fftff",
    "list IS NOT NULL": "ttftt",
    "n IN (1, 2, -3)": "tfntf",
    "s NOT IN ('EU', 'Ü')": "ftntf",
    "n BETWEEN 1 AND 5": "ttnft",
    "n NOT BETWEEN 1 AND 5 AND b": "ffntf",
    "n <=> 5": "ftfft",
    "day >= '2024-12-31'": "ftnft",
    "day = DATE '2024-01-01'": "tfnff",
    "at > TIMESTAMP '2024-01-01 11:59:59'": "tnnnn",
    "at = '2024-01-01 12:00:00'": "tnnnn",
    "`Odd name` > 2": "ffttt",
    "CAST(n AS string) = '5'": "ftnft",
    "(n = 1 OR n = 5) AND NOT (s = 'EU')": "ftnft",
}
