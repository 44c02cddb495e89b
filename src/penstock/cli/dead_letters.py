"""`penstock dead-letters`: the commands. What they do is in `letter_orders`, which is loaded when one of them runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    help="Rows that could not be applied: look at them, and apply them once they can be. See `refused` in the configuration.",
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="the pipeline's YAML file", show_default=False)]
Names = Annotated[list[str] | None, typer.Option("--table", metavar="TABLE", help="only of this table; may be given more than once")]


@app.command("list")
def list_letters(
    config: ConfigPath,
    table: Names = None,
    every: Annotated[bool, typer.Option("--all", help="also those that a later change or a replay has settled")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for programs, with the values of the rows")] = False,
) -> None:
    """The letters that are open: table, position, reason, key. Needs no Spark, and works while the pipeline runs."""
    from penstock.cli.letter_orders import print_letters

    print_letters(config, table or [], every=every, as_json=as_json)


@app.command()
def replay(config: ConfigPath, table: Names = None) -> None:
    """Apply the open letters under the configuration of now. A running pipeline does it within seconds, a stopped one when it runs."""
    from penstock.cli.letter_orders import order_replay

    order_replay(config, table or [])
