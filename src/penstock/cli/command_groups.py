"""The command groups `penstock tables` and `penstock dead-letters`.

Their actions are in `table_commands`, imported when one runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

tables_app = typer.Typer(
    no_args_is_help=True,
    help="Add, remove, pause, resume or resync tables. A running pipeline does it within seconds, a "
    "stopped one at its next run.",
)

ConfigPath = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="Configuration file of the pipeline (YAML).", show_default=False),
]
TableNames = Annotated[
    list[str],
    typer.Argument(
        metavar="TABLE…", help="schema.table, with double quotes where SQL needs them.", show_default=False
    ),
]


@tables_app.command("list")
def list_tables(
    config: ConfigPath, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """List all tables of the pipeline, their states, and the settings made by these commands."""
    from penstock.cli.table_commands import print_tables

    print_tables(config, as_json=as_json)


@tables_app.command()
def add(config: ConfigPath, tables: TableNames) -> None:
    """Add tables that the configuration does not select. They are copied while the other tables continue to
    stream.
    """
    _order(config, tables, "add")


@tables_app.command()
def remove(config: ConfigPath, tables: TableNames) -> None:
    """Remove tables from the pipeline. The target tables keep their rows. A table that is added again is
    copied again.
    """
    _order(config, tables, "remove")


@tables_app.command()
def pause(config: ConfigPath, tables: TableNames) -> None:
    """Stop updating the targets of tables until they are resumed.

    The spool keeps their changes, so the source retains WAL (unless confirm: spooled).
    """
    _order(config, tables, "pause")


@tables_app.command()
def resume(config: ConfigPath, tables: TableNames) -> None:
    """Continue paused tables from their positions."""
    _order(config, tables, "resume")


@tables_app.command()
def resync(config: ConfigPath, tables: TableNames) -> None:
    """Copy tables again next to their targets, and swap the copies in when they have caught up."""
    _order(config, tables, "resync")


def _order(config: Path, tables: list[str], what: str) -> None:
    from penstock.cli.table_commands import order

    order(config, tables, what)


dead_letters_app = typer.Typer(
    no_args_is_help=True,
    help="List and replay rejected rows in the dead-letter queue. See `refused` in the configuration.",
)
RejectedTables = Annotated[
    list[str] | None, typer.Option("--table", metavar="TABLE", help="Only this table; can be repeated.")
]


@dead_letters_app.command("list")
def list_letters(
    config: ConfigPath,
    table: RejectedTables = None,
    every: Annotated[
        bool, typer.Option("--all", help="Include dead letters that were superseded or replayed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the values of the rows.")] = False,
) -> None:
    """List open dead letters: table, position, key and reason.

    Needs no Spark, and works while the pipeline runs.
    """
    from penstock.cli.table_commands import print_letters

    print_letters(config, table or [], every=every, as_json=as_json)


@dead_letters_app.command()
def replay(config: ConfigPath, table: RejectedTables = None) -> None:
    """Apply the open dead letters again, with the current configuration of the pipeline.

    A running pipeline does it within seconds, a stopped one at its next run.
    """
    from penstock.cli.table_commands import order_replay

    order_replay(config, table or [])
