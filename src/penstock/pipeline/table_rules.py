"""The rules that say which tables are mirrored, and how."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from pydantic import Field, model_validator

from penstock.pipeline.existing_policy import ExistingPolicy
from penstock.pipeline.letters.policy import RefusedPolicy
from penstock.pipeline.references import EnvReference, FileReference, Model
from penstock.pipeline.routes import SOURCE_COLUMN, Route
from penstock.pipeline.schema_policy import SchemaPolicy
from penstock.pipeline.transform_config import ColumnsConfig
from penstock.schema import TableName
from penstock.sinks.layout import Mode
from penstock.transforms.transform import Transform


class TableRule(Model):
    """Which tables are mirrored: one by name, or all that match a pattern."""

    table: str | None = Field(
        None,
        description="schema.table, quoted as in SQL where need be; a rule of plain text is this, or `match` if it has `*`, `?` or `[`",
    )
    match: str | None = Field(None, description="pattern over schema.table, with `*`, `?` and `[…]`; case counts")
    exclude: tuple[str, ...] = Field((), description="patterns that take tables out again")
    mode: Mode | None = Field(None, description="`mode` of these tables; of several rules that say one the last counts")
    schema_changes: SchemaPolicy | None = Field(
        None, description="`schema_changes` of these tables; of several rules that say it the last counts"
    )
    columns: ColumnsConfig | None = Field(
        None,
        description="columns to drop, rename, hash, mask or cast; of several rules that say `columns`, `where` or `sql` the last counts",
    )
    where: str | None = Field(
        None, description="a condition in Spark SQL over the source's columns: the target has just the rows that meet it"
    )
    sql: str | None = Field(
        None,
        description="a whole query in Spark SQL, `SELECT … FROM source [WHERE …]`, each row by itself: what the target has of the table; "
        "in place of `columns` and `where`",
    )
    into: str | None = Field(
        None,
        description="one table of the target, schema.table, into which all these tables go; of several rules that say it the last counts",
    )
    source_column: str | None = Field(
        None, min_length=1, description=f"with `into`: the column that says from which table a row is; default: `{SOURCE_COLUMN}`"
    )
    existing: ExistingPolicy | None = Field(None, description="`existing` of these tables; of several rules that say it the last counts")
    refused: RefusedPolicy | None = Field(None, description="`refused` of these tables; of several rules that say it the last counts")

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
                raise ValueError("exclude: goes with match:")
        if self.sql is not None and (self.columns is not None or self.where is not None):
            raise ValueError("sql: says what columns: and where: say: give either the one or the others")
        if self.into is not None:
            TableName.parse(self.into)
        elif self.source_column is not None:
            raise ValueError("source_column: goes with into:")
        return self

    @property
    def transforms(self) -> bool:
        """Whether it says what is done to rows."""
        return self.columns is not None or self.where is not None or self.sql is not None

    @property
    def route(self) -> Route | None:
        return None if self.into is None else Route(_parsed(self.into), self.source_column or SOURCE_COLUMN)

    def selects(self, name: TableName) -> bool:
        if self.table is not None:
            return _parsed(self.table) == name
        return _matches(name, self.match or "") and not any(_matches(name, pattern) for pattern in self.exclude)


def build_transform(rule: TableRule, hash_key: EnvReference | FileReference | None, *, needs_key: bool) -> Transform:
    """The secret is resolved here."""
    if rule.sql is not None:
        return Transform(sql=rule.sql, needs_key=needs_key)
    columns = rule.columns or ColumnsConfig.model_validate({})
    key = hash_key.resolve() if hash_key is not None and columns.hash else None
    return columns.build(rule.where, key, needs_key=needs_key)


@cache
def _parsed(text: str) -> TableName:
    """Of a thousand names, each is compared with each of a thousand tables."""
    return TableName.parse(text)


def _matches(name: TableName, pattern: str) -> bool:
    """Schema and table each by their own part, so that `a.*` is no other schema's, whatever dots its name has."""
    schema, dot, table = pattern.partition(".")
    if not dot:
        return fnmatchcase(f"{name.schema}.{name.name}", pattern)
    return fnmatchcase(name.schema, schema) and fnmatchcase(name.name, table)
