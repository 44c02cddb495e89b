"""pgvector: vector and halfvec, `[1,2.5]`, as lists of floats; sparsevec, `{1:0.5,3:2}/5`, as dimensions, indices (from 1) and values."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.postgres.types.arrays import Bools, as_bools
from penstock.postgres.types.column import WRITTEN_OTHERWISE, DecodedColumn, TextType, cast, fixed, not_a_value, tolerant
from penstock.postgres.types.lists import split
from penstock.postgres.types.quoting import Texts, ragged, strings_between

DENSE_TYPE = pa.list_(pa.float32())
SPARSE_TYPE = pa.struct([("dimensions", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float32()))])

_EMPTY_DENSE, _EMPTY_SPARSE = pa.scalar("[]"), pa.scalar("{}/0")
_SPARSE = r"^(?P<entries>\{.*\})/(?P<dimensions>[0-9]+)$"
_ENTRY = r"^(?P<index>[0-9]+):(?P<value>[^:]+)$"


def _elements(texts: Texts, brackets: bytes, arrow_type: pa.DataType) -> tuple[pa.StringArray, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    is_framed = texts.ends - texts.starts >= len(brackets)
    if not is_framed.all():
        raise not_a_value(arrow_type)
    opens, closes = texts.octets == brackets[0], texts.octets == brackets[1]
    if not (opens[texts.starts] & closes[texts.ends - 1] & (texts.count(opens | closes) == len(brackets))).all():
        raise not_a_value(arrow_type)
    pieces = split(texts, None, ord(","))
    return strings_between(texts.octets, pieces.begins, pieces.ends), pieces.sizes


def _present(values: pa.StringArray) -> Bools | None:
    return as_bools(values.is_valid()) if values.null_count else None


def _decode_dense(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    if len(values) == 0:
        return DecodedColumn(pa.array([], arrow_type))
    elements, sizes = _elements(Texts.of(values, _EMPTY_DENSE), b"[]", arrow_type)
    return DecodedColumn(ragged(arrow_type, sizes, _present(values), cast(elements, arrow_type.value_type)))


def _decode_sparse(values: pa.StringArray, arrow_type: pa.DataType) -> DecodedColumn:
    if len(values) == 0:
        return DecodedColumn(pa.array([], arrow_type))
    parts = pc.extract_regex(pc.fill_null(values, _EMPTY_SPARSE), _SPARSE)
    if parts.null_count:
        raise not_a_value(arrow_type)
    texts, sizes = _elements(Texts.of(parts.field("entries"), _EMPTY_SPARSE), b"{}", arrow_type)
    entries = pc.extract_regex(texts, _ENTRY)
    if entries.null_count:
        raise not_a_value(arrow_type)
    fields = {name: arrow_type.field(name).type for name in ("dimensions", "indices", "values")}
    indices = ragged(fields["indices"], sizes, None, cast(entries.field("index"), fields["indices"].value_type))
    weights = ragged(fields["values"], sizes, None, cast(entries.field("value"), fields["values"].value_type))
    dimensions = cast(parts.field("dimensions"), fields["dimensions"])
    mask = values.is_null() if values.null_count else None
    return DecodedColumn(pa.StructArray.from_arrays([dimensions, indices, weights], fields=list(arrow_type), mask=mask))


TYPES = {
    "vector": TextType(fixed(DENSE_TYPE), tolerant(_decode_dense), WRITTEN_OTHERWISE),
    "halfvec": TextType(fixed(DENSE_TYPE), tolerant(_decode_dense), WRITTEN_OTHERWISE),
    "sparsevec": TextType(fixed(SPARSE_TYPE), tolerant(_decode_sparse), WRITTEN_OTHERWISE),
}
