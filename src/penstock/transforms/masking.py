"""Masks of texts: some characters at the ends stay, whatever stands between becomes three stars, so that not even its length is told."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from penstock.transforms.texts import with_elements

STARS = "***"


def can_mask(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(arrow_type.value_type if pa.types.is_list(arrow_type) else arrow_type))


@dataclass(frozen=True, slots=True)
class Mask:
    """A text no longer than `first` and `last` together is masked as a whole. Null stays null. Of arrays the elements are masked."""

    first: int = 0
    last: int = 0

    def __call__(self, values: pa.Array) -> pa.Array:
        if pa.types.is_list(values.type):
            return with_elements(values, self(values.flatten()))
        shown = self.first + self.last
        if not shown:
            return pc.if_else(values.is_valid(), pa.scalar(STARS), pa.scalar(None, pa.string()))
        head = pc.utf8_slice_codeunits(values, 0, self.first) if self.first else ""
        tail = pc.utf8_slice_codeunits(values, -self.last, 2**31 - 1) if self.last else ""
        masked = pc.binary_join_element_wise(head, STARS, tail, "")
        return pc.if_else(pc.greater(pc.utf8_length(values), shown), masked, pc.if_else(values.is_valid(), STARS, values))
