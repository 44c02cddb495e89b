"""bool: `t` and `f` as the output function writes it, `true` and `false` as a cast to text does."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from penstock.postgres.types.column import DecodedColumn, TextType, fixed, not_a_value

# Made once: turning a Python value into an Arrow one looks for pandas, each time anew where it is not installed.
_WRITTEN = [(pa.scalar("t"), pa.scalar("f")), (pa.scalar("true"), pa.scalar("false"))]


def _decode(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    for true, false in _WRITTEN:
        decoded = pc.equal(values, true)
        if decoded.true_count + pc.equal(values, false).true_count + values.null_count == len(values):
            return DecodedColumn(decoded)
    raise not_a_value(arrow_type)


TYPES = {"bool": TextType(fixed(pa.bool_()), _decode)}
