"""What `penstock tables` does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

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
_OF_WHAT_EXISTS = {"add", "pause", "renew"}
_OF_WHAT_IS_SELECTED = {"remove", "pause", "resume", "renew"}


def print_tables(config: Path, *, as_json: bool) -> None:
    loaded = load_config(config)
    orders = load_orders(loaded.state)
    epoch = inspect_status(loaded).epoch
    states = {name: status.state.value for name, status in epoch.tables.items()} if epoch is not None else {}
    with connect(loaded.source.address()) as connection:
        selection = select_tables(connection, loaded)
    names = sorted({*selection.tables, *selection.refused, *states, *orders.removed})
    rows = [(str(name), states.get(name, "pending" if name not in orders.removed else ""), _ordered(name, orders)) for name in names]
    if as_json:
        typer.echo(json.dumps([{"table": name, "state": state or None, "ordered": ordered} for name, state, ordered in rows], indent=2))
        return
    shown = Table("table", "state", "ordered", box=None)
    for name, state, ordered in rows:
        shown.add_row(name, state, ", ".join(ordered))
    Console().print(shown)


def order(path: Path, names: list[str], what: str) -> None:
    """Write the order down. A table that the source or the pipeline does not have is refused where that would be a mistake."""
    config = load_config(path)
    tables = [_parse(name) for name in names]
    selects = with_orders(config).selects
    strange = [name for name in tables if not selects(name)] if what in _OF_WHAT_IS_SELECTED else []
    if strange:
        hint = "check schema and spelling; `penstock tables list` shows them, and `penstock tables add` takes one in"
        raise NoTablesError(f"the pipeline has no table {', '.join(map(str, strange))}", hint=hint)
    if what in _OF_WHAT_EXISTS:
        _check_exist(config, tables)
    change_orders(config.state, lambda orders: _CHANGES[what](orders, tables))
    typer.echo(f"ordered: {', '.join(map(str, tables))}; see `penstock tables list`")


def _parse(text: str) -> TableName:
    try:
        return TableName.parse(text)
    except ValueError as error:
        raise ConfigError(f"{text} is {error}", hint='write it as in SQL: public.orders, or public."my orders"') from error


def _check_exist(config: PipelineConfig, tables: Iterable[TableName]) -> None:
    with connect(config.source.address()) as connection:
        known = {table.name for table in inspect_tables(connection)}
    unknown = [name for name in tables if name not in known]
    if unknown:
        raise NoTablesError(f"the source has no table {', '.join(map(str, unknown))}", hint="check schema and spelling; case counts")


def _ordered(name: TableName, orders: TableOrders) -> list[str]:
    return [what for what in ("added", "removed", "paused", "resync") if name in getattr(orders, what)]
