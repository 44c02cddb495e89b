"""`penstock verify`: the comparison, for people."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.cli.run import start_session
from penstock.errors import NoTablesError
from penstock.pipeline.config import load_config
from penstock.pipeline.verify import Comparison, compare_tables

_DIFFERENT = 4


def run_verify(path: Path, console: Console) -> int:
    config = load_config(path)
    config.source.address()
    comparisons = compare_tables(start_session(config), config)
    if not comparisons:
        raise NoTablesError("there is nothing to compare: no selected table has a target yet", hint="run the pipeline first")
    print_comparisons(comparisons, console)
    return 0 if all(each.equal for each in comparisons) else _DIFFERENT


def print_comparisons(comparisons: list[Comparison], console: Console) -> None:
    console.print("[bold]Verify[/]: source and target, row by row")
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for heading in ("  table", "source", "target", "missing", "extra", "different", ""):
        table.add_column(heading, justify="left" if heading in ("  table", "") else "right", no_wrap=True)
    for each in comparisons:
        figures = (f"{each.source_rows:,}", f"{each.target_rows:,}", str(each.missing), str(each.extra), str(each.different))
        table.add_row(escape(f"  {each.table}"), *figures, "[green]equal[/]" if each.equal else "[red]different[/]")
        for example in each.examples:
            table.add_row(escape(f"    {example}"))
    console.print(table)
