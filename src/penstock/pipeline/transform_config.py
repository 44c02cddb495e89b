"""What a rule says of the columns and rows of its tables."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from penstock.pipeline.references import Model
from penstock.secret import Secret
from penstock.transforms.casting import parse_cast
from penstock.transforms.masking import Mask
from penstock.transforms.transform import Transform


class MaskConfig(Model):
    """What stays readable of a text; the rest becomes `***`."""

    first: int = Field(0, ge=0, description="characters at the beginning")
    last: int = Field(0, ge=0, description="characters at the end")


class ColumnsConfig(Model):
    """What becomes of columns. Names are the source's, exactly."""

    drop: tuple[str, ...] = Field((), description="columns that the target does not have")
    rename: dict[str, str] = Field(default_factory=dict, description="columns that are called otherwise in the target")
    hash: tuple[str, ...] = Field((), description="columns of which the target has only HMAC-SHA-256 under `hash_key`, as hexadecimal text")
    mask: dict[str, MaskConfig] = Field(default_factory=dict, description="texts of which the target has only the ends")
    cast: dict[str, str] = Field(
        default_factory=dict,
        description="columns that get another type: string, boolean, smallint, int, bigint, double, date, timestamp, timestamp_ntz, "
        "decimal(p,s); a row with a value that the type cannot hold is refused",
    )

    @field_validator("cast")
    @classmethod
    def _types(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value.values():
            parse_cast(name)
        return value

    @model_validator(mode="after")
    def _once(self) -> ColumnsConfig:
        gone, hashed = set(self.drop), set(self.hash)
        others = {*self.rename, *self.mask, *self.cast}
        if twice := sorted(gone & (hashed | others)):
            raise ValueError(f"column {twice[0]!r} is dropped, and nothing else can be said of it")
        if twice := sorted(hashed & {*self.mask, *self.cast}):
            raise ValueError(f"column {twice[0]!r} is hashed, and can be neither masked nor cast")
        return self

    def build(self, where: str | None, key: Secret | None, *, needs_key: bool) -> Transform:
        masks = {name: Mask(each.first, each.last) for name, each in self.mask.items()}
        hash_key = key if self.hash else None
        return Transform(self.drop, dict(self.rename), self.hash, masks, dict(self.cast), where, key=hash_key, needs_key=needs_key)
