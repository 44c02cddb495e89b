"""Actions of `penstock tables` and `penstock dead-letters`: list tables and dead letters, write overrides."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.cli.status import name_width
from penstock.config.model import PipelineConfig, load_config
from penstock.errors import ConfigError, NoTablesError
from penstock.pipeline.dead_letters.rejections import DeadLetterStatus
from penstock.pipeline.dead_letters.store import DeadLetterStore
from penstock.pipeline.status import inspect_status
from penstock.pipeline.table_overrides import TableOverrides, change_overrides, load_overrides, with_overrides
from penstock.pipeline.table_selection import select_tables
from penstock.postgres.catalog import inspect_tables
from penstock.postgres.connection import connect
from penstock.schema import TableName

_CHANGES: dict[str, Callable[[TableOverrides, Iterable[TableName]], TableOverrides]] = {
    "add": TableOverrides.add,
    "remove": TableOverrides.remove,
    "pause": TableOverrides.pause,
    "resume": TableOverrides.resume,
    "resync": TableOverrides.request_resync,
}
_NAMED = 3
_OF_WHAT_EXISTS = {"add", "pause", "resync"}
_OF_WHAT_IS_SELECTED = {"remove", "pause", "resume", "resync"}


def print_tables(config: Path, *, as_json: bool) -> None:
    loaded = load_config(config)
    orders = load_overrides(loaded.state)
    epoch = inspect_status(loaded).epoch
    states = {name: status.state.value for name, status in epoch.tables.items()} if epoch is not None else {}
    with connect(loaded.source.address()) as connection:
        selection = select_tables(connection, loaded, asks_spark=False)
    names = sorted({*selection.tables, *selection.refused, *states, *orders.removed})
    rows = [
        (name, states.get(name, "pending" if name not in orders.removed else ""), _ordered(name, orders))
        for name in names
    ]
    members = {
        name: [str(member.name) for member in table.members]
        for name, table in selection.tables.items()
        if table.members
    }
    if as_json:
        documents = [
            {"table": str(name), "state": state or None, "ordered": ordered} for name, state, ordered in rows
        ]
        whole = [
            {**each, **({"members": members[name]} if name in members else {})}
            for each, name in zip(documents, names, strict=True)
        ]
        typer.echo(json.dumps(whole, indent=2))
        return
    labels = {name: f"{name}{_from(members.get(name, ()))}" for name in names}
    width = name_width(labels.values())
    for name, state, ordered in rows:
        typer.echo(f"{labels[name]:<{width}}  {state:<12}  {', '.join(ordered)}".rstrip())


def _from(members: Sequence[str]) -> str:
    more = f" and {len(members) - _NAMED} more" if len(members) > _NAMED else ""
    return f" ← {', '.join(members[:_NAMED])}{more}" if members else ""


def order(path: Path, names: list[str], what: str) -> None:
    """Write a request to the state directory. `what` is a key of `_CHANGES`.

    Raises `NoTablesError` if the source or the pipeline does not have the table.
    """
    config = load_config(path)
    tables = [parse_table(name) for name in names]
    ordered = with_overrides(config)
    strange = [name for name in tables if not ordered.has(name)] if what in _OF_WHAT_IS_SELECTED else []
    members = {
        name: route.into
        for name in strange
        if ordered.selects(name) and (route := ordered.route_of(name)) is not None
    }
    if members and what != "remove":
        name, into = next(iter(members.items()))
        raise NoTablesError(
            f"{name} is routed into {into} and is not a separate table of the pipeline",
            hint=f"use {into} instead",
        )
    strange = [name for name in strange if name not in members]
    if strange:
        hint = (
            "check schema and spelling; `penstock tables list CONFIG` shows the tables, `penstock tables add "
            "CONFIG TABLE` adds one"
        )
        raise NoTablesError(f"the pipeline has no table {', '.join(map(str, strange))}", hint=hint)
    if what in _OF_WHAT_EXISTS:
        _check_exist(config, tables)
    change_overrides(config.state, lambda orders: _CHANGES[what](orders, tables))
    typer.echo(f"{what} requested: {', '.join(map(str, tables))}; see `penstock tables list CONFIG`")


def parse_table(text: str) -> TableName:
    try:
        return TableName.parse(text)
    except ValueError as error:
        raise ConfigError(
            str(error), hint='write it as in SQL: public.orders, or public."my orders"'
        ) from error


def _check_exist(config: PipelineConfig, tables: Iterable[TableName]) -> None:
    with connect(config.source.address()) as connection:
        known = {table.name for table in inspect_tables(connection)} | {
            rule.route.into for rule in config.tables if rule.route is not None
        }
    unknown = [name for name in tables if name not in known]
    if unknown:
        raise NoTablesError(
            f"the source has no table {', '.join(map(str, unknown))}",
            hint="check schema and spelling; names are case-sensitive",
        )


def _ordered(name: TableName, orders: TableOverrides) -> list[str]:
    return [what for what in ("added", "removed", "paused", "resync") if name in getattr(orders, what)]


def print_letters(path: Path, names: list[str], *, every: bool, as_json: bool) -> None:
    config = load_config(path)
    wanted = {str(parse_table(name)) for name in names}
    letters = [
        letter
        for letter in DeadLetterStore(config.sink.root, config.pipeline).load().to_pylist()
        if (every or letter["status"] == DeadLetterStatus.OPEN) and (not wanted or letter["table"] in wanted)
    ]
    if as_json:
        typer.echo(json.dumps([_document(letter) for letter in letters], indent=2, ensure_ascii=False))
        return
    shown = Table("table", "position", "change", "key", "status", "reason", box=None)
    for each in letters:
        cells = (
            each["table"],
            each["position"],
            each["change_type"],
            each["key"] or "",
            each["status"],
            f"{each['code']}: {each['reason']}",
        )
        shown.add_row(*map(escape, cells))
    Console().print(shown)


def order_replay(path: Path, names: list[str]) -> None:
    config = load_config(path)
    found = DeadLetterStore(config.sink.root, config.pipeline).open_counts
    tables = [parse_table(name) for name in names] or list(found)
    strange = [name for name in tables if name not in found]
    if strange:
        raise NoTablesError(
            f"there are no open dead letters of {', '.join(map(str, strange))}",
            hint="see `penstock dead-letters list CONFIG`",
        )
    change_overrides(config.state, lambda orders: orders.replay_dead_letters(tables))
    count = sum(found[name] for name in tables)
    requested = (
        f"replay requested: {count:,} dead letter{'' if count == 1 else 's'} of {', '.join(map(str, tables))}"
    )
    typer.echo(requested if tables else "no open dead letters")


def _document(letter: dict[str, Any]) -> dict[str, Any]:
    """A dead letter as a JSON object. Key and row stay text, because JSON readers do not preserve all digits
    of numbers.
    """
    return {
        name: value.isoformat() if isinstance(value, datetime) else value for name, value in letter.items()
    }
