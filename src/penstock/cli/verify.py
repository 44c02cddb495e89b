"""`penstock verify`: run the comparison and print the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.cli.run import start_session
from penstock.config.model import load_config
from penstock.errors import ConfigError
from penstock.pipeline.verify.compare import Comparison, RowDifference
from penstock.pipeline.verify.verify import VerifyReport, verify_tables
from penstock.postgres.connection import connect
from penstock.schema import TableName

_DIFFERENT, _HELD, _INCOMPLETE = 4, 5, 6
_LONGEST = 60
_NULL = "[dim]null[/]"


def run_verify(
    path: Path, tables: Sequence[str], *, as_json: bool, console: Console, progress: Console
) -> int:
    """Compare source and target. Prints the report to `console` and the progress to `progress`; returns the
    exit code.
    """
    config = load_config(path)
    names = [_parsed(text) for text in tables]
    with connect(config.source.address()):  # raises for connection problems before Spark starts
        pass
    with progress.status("starting Spark …") as status:
        report = verify_tables(
            start_session(config), config, names, lambda text: status.update(escape(f"{text} …"))
        )
    if as_json:
        console.print_json(json.dumps(report.as_document()))
    else:
        print_report(report, console)
    return exit_code(report)


def exit_code(report: VerifyReport) -> int:
    if not report.complete:
        return _INCOMPLETE
    return 0 if report.equal else _HELD if report.equal_but_held else _DIFFERENT


def print_report(report: VerifyReport, console: Console) -> None:
    compared = [each.comparison for each in report.verdicts if each.comparison is not None]
    if compared:
        print_comparisons(compared, console)
    for each in report.verdicts:
        if each.comparison is None:
            why = f": {each.reason}" if each.reason else ""
            console.print(
                escape(f"  {each.table} is {each.state.value} and was not compared{why}"),
                highlight=False,
                soft_wrap=True,
            )
            if each.remedy:
                console.print(escape(f"    fix: {each.remedy}"), highlight=False, soft_wrap=True)
    places = sorted({each.position for each in report.verdicts if each.comparison is not None})
    if places:
        console.print(f"at {', '.join(map(str, places))}, in {report.seconds:.1f} s", highlight=False)


def print_comparisons(comparisons: Sequence[Comparison], console: Console) -> None:
    console.print("[bold]Verify[/]: source and target, row by row")
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for heading in ("  table", "source", "target", "missing", "extra", "different", ""):
        table.add_column(heading, justify="left" if heading in ("  table", "") else "right", no_wrap=True)
    for each in comparisons:
        figures = (
            f"{each.source_rows:,}",
            f"{each.target_rows:,}",
            f"{each.missing:,}",
            f"{each.extra:,}",
            f"{each.different:,}",
        )
        table.add_row(escape(f"  {each.table}"), *figures, _verdict(each))
    console.print(table)
    for each in comparisons:
        if each.examples:
            _print_examples(each, console)


def _verdict(comparison: Comparison) -> str:
    words = "[green]equal[/]" if comparison.equal_but_held else "[red]different[/]"
    return f"{words}, except {comparison.held:,} rows in the dead-letter queue" if comparison.held else words


def _print_examples(comparison: Comparison, console: Console) -> None:
    columns = ", ".join(f"{name} ({count:,})" for name, count in comparison.columns.items())
    console.print(
        escape(f"\n{comparison.table}{': different columns: ' + columns if columns else ''}"), highlight=False
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for heading in ("  row", "key", "column", "source", "target"):
        table.add_column(heading, overflow="fold")
    for each in comparison.examples:
        rows = [(change.column, _value(change.source), _value(change.target)) for change in each.columns] or [
            ("", "", "")
        ]
        for name, source, target in rows:
            table.add_row(f"  {each.kind}", _key(each), escape(name), source, target)
    console.print(table)
    shown = {
        kind: sum(each.kind == kind for each in comparison.examples)
        for kind in ("missing", "extra", "different")
    }
    more = [
        f"{count - shown[kind]:,} more {kind}"
        for kind, count in _counts(comparison).items()
        if count > shown[kind]
    ]
    if more:
        console.print(f"  and {', '.join(more)}", highlight=False)


def _counts(comparison: Comparison) -> dict[str, int]:
    return {"missing": comparison.missing, "extra": comparison.extra, "different": comparison.different}


def _key(row: RowDifference) -> str:
    return ", ".join(f"{escape(name)}={_value(text)}" for name, text in row.key.items())


def _value(text: str | None) -> str:
    if text is None:
        return _NULL
    return escape(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…")


def _parsed(text: str) -> TableName:
    try:
        return TableName.parse(text)
    except ValueError as error:
        raise ConfigError(
            f"--table: {error}", hint="write schema.table, with double quotes where SQL needs them"
        ) from error
