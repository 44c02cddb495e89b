"""`penstock tables`: the commands. What they do is in `table_orders`, which is loaded when one of them runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    help="Add, remove, pause, resume or renew single tables. A running pipeline obeys within seconds, a stopped one when it runs.",
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="the pipeline's YAML file", show_default=False)]
Names = Annotated[list[str], typer.Argument(metavar="TABLE…", help="schema.table, quoted as in SQL", show_default=False)]


@app.command("list")
def list_tables(config: ConfigPath, as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False) -> None:
    """Every table that is selected, its state, and what is ordered about it."""
    from penstock.cli.table_orders import print_tables

    print_tables(config, as_json=as_json)


@app.command()
def add(config: ConfigPath, tables: Names) -> None:
    """Mirror tables that the configuration does not select. Their rows are copied while the others go on."""
    _order(config, tables, "add")


@app.command()
def remove(config: ConfigPath, tables: Names) -> None:
    """Stop mirroring tables. What the targets hold stays; adding a table again copies it anew."""
    _order(config, tables, "remove")


@app.command()
def pause(config: ConfigPath, tables: Names) -> None:
    """Leave targets as they are. The spool keeps the changes, and so the source keeps its WAL, until they are resumed."""
    _order(config, tables, "pause")


@app.command()
def resume(config: ConfigPath, tables: Names) -> None:
    """Go on with paused tables, from where they are."""
    _order(config, tables, "resume")


@app.command()
def resync(config: ConfigPath, tables: Names) -> None:
    """Copy tables anew beside their targets, and put the copies in their place when they have caught up."""
    _order(config, tables, "renew")


def _order(config: Path, tables: list[str], what: str) -> None:
    from penstock.cli.table_orders import order

    order(config, tables, what)
