"""How often a random test repeats itself:

`make test-long` sets PENSTOCK_TEST_ROUNDS to run more rounds than CI does.
"""

from __future__ import annotations

import os

FACTOR = int(os.environ.get("PENSTOCK_TEST_ROUNDS", "1"))


def rounds(in_ci: int) -> int:
    return in_ci * FACTOR
