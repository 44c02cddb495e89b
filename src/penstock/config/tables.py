"""Table rules: which tables are replicated, and the transform, mode and policies of each."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from pydantic import Field, field_validator, model_validator

from penstock.config.policies import SOURCE_COLUMN, ExistingPolicy, RefusedPolicy, Route, SchemaPolicy
from penstock.config.secrets import EnvReference, FileReference, Model
from penstock.schema import TableName
from penstock.secret import Secret
from penstock.sinks.modes import Mode
from penstock.transforms.casts import parse_cast
from penstock.transforms.columns import Mask
from penstock.transforms.transform import Transform


class MaskConfig(Model):
    """Number of characters that are not masked; the rest becomes `***`."""

    first: int = Field(0, ge=0, description="Characters at the beginning.")
    last: int = Field(0, ge=0, description="Characters at the end.")


class ColumnsConfig(Model):
    """Column transforms. Column names are those of the source, and case-sensitive."""

    drop: tuple[str, ...] = Field((), description="Columns to leave out.")
    rename: dict[str, str] = Field(
        default_factory=dict, description="New names of columns, by their source names."
    )
    hash: tuple[str, ...] = Field(
        (), description="Columns to replace by their HMAC-SHA-256 with `hash_key`, as hexadecimal text."
    )
    mask: dict[str, MaskConfig] = Field(
        default_factory=dict, description="Text columns to mask, except for their ends."
    )
    cast: dict[str, str] = Field(
        default_factory=dict,
        description="New types of columns: `string`, `boolean`, `smallint`, `int`, `bigint`, `double`, "
        "`date`, `timestamp`, "
        "`timestamp_ntz` or `decimal(p,s)`. A row with a value that cannot be cast is rejected.",
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
            raise ValueError(f"column {twice[0]!r} is in drop: and cannot have another transform")
        if twice := sorted(hashed & {*self.mask, *self.cast}):
            raise ValueError(f"column {twice[0]!r} is in hash: and cannot be masked or cast")
        return self

    def build(self, where: str | None, key: Secret | None, *, needs_key: bool) -> Transform:
        masks = {name: Mask(each.first, each.last) for name, each in self.mask.items()}
        hash_key = key if self.hash else None
        return Transform(
            self.drop,
            dict(self.rename),
            self.hash,
            masks,
            dict(self.cast),
            where,
            key=hash_key,
            needs_key=needs_key,
        )


class TableRule(Model):
    """Selects one table by name, or all tables that match a pattern.

    If several rules match a table, the last rule that sets a key defines the value of that key. A rule can
    also be a plain string. It is then the value of `table`, or of `match` if it contains `*`, `?` or `[`.
    """

    table: str | None = Field(
        None,
        description="Name of one table, `schema.table`, with double quotes where SQL needs them.",
    )
    match: str | None = Field(
        None, description="Case-sensitive pattern over `schema.table`, with `*`, `?` and `[…]`."
    )
    exclude: tuple[str, ...] = Field((), description="Patterns of tables that `match` does not select.")
    mode: Mode | None = Field(None, description="`mode` of these tables.")
    schema_changes: SchemaPolicy | None = Field(None, description="`schema_changes` of these tables.")
    columns: ColumnsConfig | None = Field(
        None,
        description="Columns to drop, rename, hash, mask or cast. Of several rules with `columns`, `where` "
        "or `sql`, the last "
        "one defines the whole transform.",
    )
    where: str | None = Field(
        None,
        description="Row filter: a Spark SQL condition on the source's columns. The target has the rows "
        "for which it is true.",
    )
    sql: str | None = Field(
        None,
        description="Spark SQL query, `SELECT … "
        "FROM source [WHERE …]`, that is applied to each row separately. It replaces "
        "`columns` and `where`.",
    )
    into: str | None = Field(
        None,
        description="Routing: the target table, `schema.table`, that all these tables are written to.",
    )
    source_column: str | None = Field(
        None,
        min_length=1,
        description="With `into`: the column with the name of the row's source table. Default: "
        f"`{SOURCE_COLUMN}`.",
    )
    existing: ExistingPolicy | None = Field(None, description="`existing` of these tables.")
    refused: RefusedPolicy | None = Field(None, description="`refused` of these tables.")

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"match": value} if any(sign in value for sign in "*?[") else {"table": value}
        return value

    @model_validator(mode="after")
    def _one_of(self) -> TableRule:
        if (self.table is None) == (self.match is None):
            raise ValueError("give either table: or match:")
        if self.table is not None:
            TableName.parse(self.table)
            if self.exclude:
                raise ValueError("exclude: needs match:")
        if self.sql is not None and (self.columns is not None or self.where is not None):
            raise ValueError("sql: cannot be combined with columns: or where:")
        if self.into is not None:
            TableName.parse(self.into)
        elif self.source_column is not None:
            raise ValueError("source_column: needs into:")
        return self

    @property
    def transforms(self) -> bool:
        """Whether the rule defines a transform."""
        return self.columns is not None or self.where is not None or self.sql is not None

    @property
    def route(self) -> Route | None:
        return None if self.into is None else Route(_parsed(self.into), self.source_column or SOURCE_COLUMN)

    def selects(self, name: TableName) -> bool:
        if self.table is not None:
            return _parsed(self.table) == name
        return _matches(name, self.match or "") and not any(
            _matches(name, pattern) for pattern in self.exclude
        )


def build_transform(
    rule: TableRule, hash_key: EnvReference | FileReference | None, *, needs_key: bool
) -> Transform:
    """Build the transform of a rule. Resolves `hash_key` if the rule hashes columns."""
    if rule.sql is not None:
        return Transform(sql=rule.sql, needs_key=needs_key)
    columns = rule.columns or ColumnsConfig.model_validate({})
    key = hash_key.resolve() if hash_key is not None and columns.hash else None
    return columns.build(rule.where, key, needs_key=needs_key)


@cache
def _parsed(text: str) -> TableName:
    """Parse a table name. Cached, because each rule is compared with each table."""
    return TableName.parse(text)


def _matches(name: TableName, pattern: str) -> bool:
    """Match schema and table separately, so that `a.*` does not match the schema `a.b`."""
    schema, dot, table = pattern.partition(".")
    if not dot:
        return fnmatchcase(f"{name.schema}.{name.name}", pattern)
    return fnmatchcase(name.schema, schema) and fnmatchcase(name.name, table)
