"""The `penstock` command: check, run, capture, status, tables, dead-letters, verify, drop, demo.

Exit codes: 0 success, 1 other errors, 2 configuration, 3 source or machine, 4 source and target differ, 5
they differ only in rows of the dead-letter queue, 6 comparison incomplete, 130 interrupted.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from penstock import __version__
from penstock.cli.command_groups import dead_letters_app as letters_app
from penstock.cli.command_groups import tables_app
from penstock.errors import EnvironmentUnfitError, PenstockError
from penstock.logs import FORMAT_VARIABLE, LEVEL_VARIABLE, LogFormat, LogLevel, configure_logging, is_json

_log = logging.getLogger("penstock.cli")  # not __name__, which is __main__ with python -m
_LOG_OPTIONS = ("--log-level", "--log-format")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # typer would print local variables, including secrets
    help="Change data capture from Postgres to Delta, Iceberg, Postgres or Parquet, on Spark.",
)


@app.callback()
def options(
    log_level: Annotated[
        LogLevel,
        typer.Option(
            "--log-level", envvar=LEVEL_VARIABLE, case_sensitive=False, help="Minimum level of log messages."
        ),
    ] = LogLevel.WARNING,
    log_format: Annotated[
        LogFormat,
        typer.Option(
            "--log-format",
            envvar=FORMAT_VARIABLE,
            case_sensitive=False,
            help="`json`: standard error has one JSON object per line, and nothing else.",
        ),
    ] = LogFormat.TEXT,
    _version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options of every command."""
    configure_logging(log_level, log_format)


app.add_typer(tables_app, name="tables")
app.add_typer(letters_app, name="dead-letters")

ConfigPath = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="Configuration file of the pipeline (YAML).", show_default=False),
]


@app.command()
def run(
    config: ConfigPath,
    once: Annotated[
        bool, typer.Option("--once", help="Apply all changes committed before the start, then exit.")
    ] = False,
) -> None:
    """Copy the tables, then apply changes until stopped."""
    from penstock.cli.run import run_pipeline

    raise typer.Exit(run_pipeline(config, once=once, console=_stderr()))


@app.command()
def capture(
    config: ConfigPath,
    forget: Annotated[
        str | None,
        typer.Option(
            metavar="CONSUMER",
            help="Remove this reader of the spool and exit. Its unread changes are no longer kept.",
        ),
    ] = None,
) -> None:
    """Read the slot into the spool until stopped, for pipelines with source.process: separate."""
    from penstock.cli.capture import run_capture, run_forget

    console = _stderr()
    raise typer.Exit(run_capture(config, console) if forget is None else run_forget(config, forget, console))


@app.command()
def check(
    config: ConfigPath, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Check what a run needs, and list all problems with their fixes.

    Changes nothing. Exit code 0: ready to run, 2 or 3: not.
    """
    from penstock.cli.status import print_check
    from penstock.pipeline.checks.check import check_pipeline

    report = check_pipeline(config)
    if as_json:
        typer.echo(json.dumps(report.as_document(), indent=2))
    else:
        print_check(report, Console())
    raise typer.Exit(report.exit_code)


@app.command()
def status(
    config: ConfigPath,
    show_all: Annotated[
        bool, typer.Option("--all", help="List every streaming table, not only the first 20.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show slot, spool, lag and tables, failed tables first.

    Needs no Spark, and works while the pipeline runs.
    """
    from penstock.cli.status import print_status
    from penstock.config.model import load_config
    from penstock.pipeline.status import inspect_status

    found = inspect_status(load_config(config))
    if as_json:
        typer.echo(json.dumps(found.as_document(), indent=2))
    else:
        print_status(found, Console(), show_all=show_all)


@app.command()
def verify(
    config: ConfigPath,
    table: Annotated[
        list[str] | None, typer.Option("--table", metavar="TABLE", help="Only this table; can be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare source and target row by row at one position, while the pipeline runs or not.

    Exit code 0: equal, 4: different or not compared, 5: equal except for rows in the dead-letter queue, 6:
    incomplete because of an error.
    """
    from penstock.cli.verify import run_verify

    code = run_verify(config, table or [], as_json=as_json, console=Console(), progress=_stderr())
    raise typer.Exit(code)


@app.command()
def drop(
    config: ConfigPath,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Drop the pipeline's objects at its source: slot, publication, event trigger, change table.

    The target tables stay but are no longer updated.
    """
    from penstock.cli.capture import drop_pipeline

    raise typer.Exit(drop_pipeline(config, is_sure=yes))


@app.command()
def demo(
    directory: Annotated[
        Path, typer.Option(help="Directory for the database, the state and the tables of the demo.")
    ] = Path("demo"),
    seconds: Annotated[float, typer.Option(help="Duration of the live workload.")] = 30.0,
) -> None:
    """Replicate a small shop from an embedded Postgres under load, and compare it row by row."""
    from penstock.cli.demo import run_demo

    raise typer.Exit(run_demo(directory, seconds, Console()))


def _stderr() -> Console:
    """Console for progress and notices. Silent with `--log-format json`."""
    return Console(stderr=True, quiet=is_json())


def _closed(error: PermissionError) -> PenstockError:
    hint = "run the command as the user who runs the pipeline: its files are private to that user"
    return EnvironmentUnfitError(f"permission denied: {error.filename}", hint=hint)


def main() -> None:
    """Entry point of the console script. An error becomes a message and an exit code, never a traceback."""
    logging.getLogger("py4j").setLevel(
        logging.CRITICAL
    )  # py4j logs every exception that is raised inside a batch
    # Without a handler at the root logger, py4j adds one that prints to standard error: it would print a
    # traceback when the JVM dies, and every later record a second time.
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        app(args=_logging_first(sys.argv[1:]), standalone_mode=True)
    except (PenstockError, PermissionError) as caught:
        error = caught if isinstance(caught, PenstockError) else _closed(caught)
        if is_json():
            _log.error(
                "command failed", extra={"code": error.code, "reason": error.message, "fix": error.hint}
            )
        else:
            Console(stderr=True).print(f"[red]error[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        from penstock.pipeline.checks.findings import exit_code

        sys.exit(exit_code(error.code))


def _logging_first(arguments: Sequence[str]) -> list[str]:
    """Move the logging options to the front, so that they can also follow the command name."""
    first: list[str] = []
    rest: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        name, given, _ = argument.partition("=")
        place = first if name in _LOG_OPTIONS else rest
        place.append(argument)
        if place is first and not given:
            first.extend(itertools.islice(waiting, 1))
    return [*first, *rest]


if __name__ == "__main__":
    main()
