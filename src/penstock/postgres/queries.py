"""Named SQL from the `.sql` files beside this module."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Any, LiteralString

from psycopg import sql

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


@cache
def _load(file: str) -> dict[str, str]:
    text = files("penstock.postgres").joinpath("sql", file).read_text(encoding="utf-8")
    parts = _NAME.split(text)[1:]
    return dict(zip(parts[::2], (body.strip() for body in parts[1::2]), strict=True))


def query(file: str, name: str) -> LiteralString:
    """The statement called `name` in `sql/<file>.sql`. It ships with the package, so it is as literal as code."""
    statement: Any = _load(f"{file}.sql")[name]
    return statement  # type: ignore[no-any-return]


def identifier(*parts: str) -> str:
    """A name as SQL must have it, for statements that people paste."""
    return sql.Identifier(*parts).as_string()
