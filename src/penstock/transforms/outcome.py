"""What came of rows that were transformed: those that are kept, and those of which nobody can say what they would be."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

REASON = "_reason\0"
"""In rejected rows, after their own columns: the reason, which names columns and never values. No column of any source can be called so."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Every row that came in is in `kept`, in `refused`, or was left out because the transform says so."""

    kept: pa.Table
    """As the target sees them: `Transform.schema`'s columns and `_exact`; of changes, all of `METADATA_FIELDS`."""
    refused: pa.Table
    """As the source has them, with the columns that came in, and `REASON`."""

    @property
    def reasons(self) -> dict[str, int]:
        """How many rows each reason holds for."""
        counted = pc.value_counts(self.refused.column(REASON)).to_pylist()
        return {str(each["values"]): int(each["counts"]) for each in counted}
