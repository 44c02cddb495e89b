"""money under `lc_monetary = C`, which both roads pin: `-$1,234.50`.

The column stores a count of the smallest unit. How many of them make a whole is a matter of the reader's locale, not of the value: it is
always read with two digits after the point.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from penstock.postgres.types.column import DecodedColumn, TextType, cast, fixed


def _decode(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    plain = pc.replace_substring(pc.replace_substring(values, "$", ""), ",", "")
    return DecodedColumn(cast(plain, arrow_type))


TYPES = {"money": TextType(fixed(pa.decimal128(19, 2)), _decode)}
