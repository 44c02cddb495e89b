"""What `penstock tables` does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import typer

from penstock.cli.status import name_width
from penstock.errors import ConfigError, NoTablesError
from penstock.pipeline.config import PipelineConfig, load_config
from penstock.pipeline.orders import TableOrders, change_orders, load_orders, with_orders
from penstock.pipeline.status import inspect_status
from penstock.pipeline.tables import select_tables
from penstock.postgres.catalog import inspect_tables
from penstock.postgres.connection import connect
from penstock.schema import TableName

_CHANGES: dict[str, Callable[[TableOrders, Iterable[TableName]], TableOrders]] = {
    "add": TableOrders.add,
    "remove": TableOrders.remove,
    "pause": TableOrders.pause,
    "resume": TableOrders.resume,
    "renew": TableOrders.renew,
}
_NAMED = 3
_OF_WHAT_EXISTS = {"add", "pause", "renew"}
_OF_WHAT_IS_SELECTED = {"remove", "pause", "resume", "renew"}


def print_tables(config: Path, *, as_json: bool) -> None:
    loaded = load_config(config)
    orders = load_orders(loaded.state)
    epoch = inspect_status(loaded).epoch
    states = {name: status.state.value for name, status in epoch.tables.items()} if epoch is not None else {}
    with connect(loaded.source.address()) as connection:
        selection = select_tables(connection, loaded, asks_spark=False)
    names = sorted({*selection.tables, *selection.refused, *states, *orders.removed})
    rows = [(name, states.get(name, "pending" if name not in orders.removed else ""), _ordered(name, orders)) for name in names]
    members = {name: [str(member.name) for member in table.members] for name, table in selection.tables.items() if table.members}
    if as_json:
        documents = [{"table": str(name), "state": state or None, "ordered": ordered} for name, state, ordered in rows]
        whole = [{**each, **({"members": members[name]} if name in members else {})} for each, name in zip(documents, names, strict=True)]
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
    """Write the order down. A table that the source or the pipeline does not have is refused where that would be a mistake."""
    config = load_config(path)
    tables = [parse_table(name) for name in names]
    ordered = with_orders(config)
    strange = [name for name in tables if not ordered.has(name)] if what in _OF_WHAT_IS_SELECTED else []
    members = {name: route.into for name in strange if ordered.selects(name) and (route := ordered.route_of(name)) is not None}
    if members and what != "remove":
        name, into = next(iter(members.items()))
        raise NoTablesError(f"{name} is routed into {into}, and is no table of the pipeline by itself", hint=f"say it of {into}")
    strange = [name for name in strange if name not in members]
    if strange:
        hint = "check schema and spelling; `penstock tables list` shows them, and `penstock tables add` takes one in"
        raise NoTablesError(f"the pipeline has no table {', '.join(map(str, strange))}", hint=hint)
    if what in _OF_WHAT_EXISTS:
        _check_exist(config, tables)
    change_orders(config.state, lambda orders: _CHANGES[what](orders, tables))
    typer.echo(f"ordered: {', '.join(map(str, tables))}; see `penstock tables list`")


def parse_table(text: str) -> TableName:
    try:
        return TableName.parse(text)
    except ValueError as error:
        raise ConfigError(f"{text} is {error}", hint='write it as in SQL: public.orders, or public."my orders"') from error


def _check_exist(config: PipelineConfig, tables: Iterable[TableName]) -> None:
    with connect(config.source.address()) as connection:
        known = {table.name for table in inspect_tables(connection)} | {rule.route.into for rule in config.tables if rule.route is not None}
    unknown = [name for name in tables if name not in known]
    if unknown:
        raise NoTablesError(f"the source has no table {', '.join(map(str, unknown))}", hint="check schema and spelling; case counts")


def _ordered(name: TableName, orders: TableOrders) -> list[str]:
    return [what for what in ("added", "removed", "paused", "resync") if name in getattr(orders, what)]
