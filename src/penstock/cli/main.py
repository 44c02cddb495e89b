"""`penstock`: check, run, capture, status, tables, dead-letters, verify, drop, demo.

Exit codes: 0 ok, 1 runtime, 2 configuration, 3 source or machine, 4 source and target differ, 5 they differ by dead letters alone, 130
interrupted.
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
from penstock.cli.dead_letters import app as letters_app
from penstock.cli.tables import app as tables_app
from penstock.errors import EnvironmentUnfitError, PenstockError
from penstock.logs import FORMAT_VARIABLE, LEVEL_VARIABLE, LogFormat, LogLevel, configure_logging, is_json

_log = logging.getLogger("penstock.cli")  # run with -m, this module has another name
_LOG_OPTIONS = ("--log-level", "--log-format")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # it would print local variables, secrets among them
    help="Mirror Postgres tables into a lakehouse, on Spark.",
)


@app.callback()
def options(
    log_level: Annotated[
        LogLevel, typer.Option("--log-level", envvar=LEVEL_VARIABLE, case_sensitive=False, help="the least level that is logged")
    ] = LogLevel.WARNING,
    log_format: Annotated[
        LogFormat,
        typer.Option(
            "--log-format",
            envvar=FORMAT_VARIABLE,
            case_sensitive=False,
            help="`json`: one JSON object a line, and nothing else on standard error",
        ),
    ] = LogFormat.TEXT,
    _version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print the version and exit")] = False,
) -> None:
    """Options of every command."""
    configure_logging(log_level, log_format)


app.add_typer(tables_app, name="tables")
app.add_typer(letters_app, name="dead-letters")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="the pipeline's YAML file", show_default=False)]


@app.command()
def run(
    config: ConfigPath,
    once: Annotated[bool, typer.Option("--once", help="catch up to what was there at the start, then exit")] = False,
) -> None:
    """Copy the tables, then follow the log until stopped."""
    from penstock.cli.run import run_pipeline

    raise typer.Exit(run_pipeline(config, once=once, console=_stderr()))


@app.command()
def capture(
    config: ConfigPath,
    forget: Annotated[
        str | None, typer.Option(metavar="CONSUMER", help="let go of what this pipeline has not released, and exit; it will not read again")
    ] = None,
) -> None:
    """Read the slot into the spool, for the pipelines that name it with source.process: separate, until stopped."""
    from penstock.cli.capture import run_capture, run_forget

    console = _stderr()
    raise typer.Exit(run_capture(config, console) if forget is None else run_forget(config, forget, console))


@app.command()
def check(config: ConfigPath, as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False) -> None:
    """Try what a run needs before its first row, leave nothing behind, and list all problems with their fixes. Exit 0 ready, 2 or 3 not."""
    from penstock.cli.check import print_check
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
    show_all: Annotated[bool, typer.Option("--all", help="list every table that is streaming, not some of them")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Show slot, spool, lag and tables, those that failed first. Needs no Spark, and works while the pipeline runs."""
    from penstock.cli.status import print_status
    from penstock.pipeline.config import load_config
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
        list[str] | None, typer.Option("--table", metavar="TABLE", help="only this table; may be given more than once")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Compare source and target row by row at one position, while the pipeline runs or not. Exit 0 equal, 4 different or not compared, 5
    equal but for rows in dead letters, 6 incomplete because of an error."""
    from penstock.cli.verify import run_verify

    code = run_verify(config, table or [], as_json=as_json, console=Console(), progress=_stderr())
    raise typer.Exit(code)


@app.command()
def drop(config: ConfigPath, yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False) -> None:
    """Drop what the pipeline has at its source: slot, publication, event trigger, change table. The tables stay, and follow nothing
    any more."""
    from penstock.cli.drop import drop_pipeline

    raise typer.Exit(drop_pipeline(config, is_sure=yes))


@app.command()
def demo(
    directory: Annotated[Path, typer.Option(help="where the demo's database, state and lake go")] = Path("demo"),
    seconds: Annotated[float, typer.Option(help="how long the live workload lasts")] = 30.0,
) -> None:
    """Mirror a small shop from an embedded Postgres, under load, and compare it row by row."""
    from penstock.cli.demo import run_demo

    raise typer.Exit(run_demo(directory, seconds, Console()))


def _stderr() -> Console:
    """For progress and notices; silent where the standard error is for programs."""
    return Console(stderr=True, quiet=is_json())


def _closed(error: PermissionError) -> PenstockError:
    hint = "run the command as the user who runs the pipeline, whose files are for that user alone"
    return EnvironmentUnfitError(f"{error.filename} is closed to this user", hint=hint)


def main() -> None:
    """The console script: errors become one message and an exit code, never a traceback."""
    logging.getLogger("py4j").setLevel(logging.CRITICAL)  # it prints every exception that our own code raises inside a batch
    try:
        app(args=_logging_first(sys.argv[1:]), standalone_mode=True)
    except (PenstockError, PermissionError) as caught:
        error = caught if isinstance(caught, PenstockError) else _closed(caught)
        if is_json():
            _log.error("command failed", extra={"code": error.code, "reason": error.message, "fix": error.hint})
        else:
            Console(stderr=True).print(f"[red]error[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        from penstock.pipeline.checks.findings import exit_code

        sys.exit(exit_code(error.code))


def _logging_first(arguments: Sequence[str]) -> list[str]:
    """Options of logging belong to every command; they may be given behind one too."""
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
