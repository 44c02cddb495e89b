"""`penstock check`, for people."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.pipeline.checks.findings import CheckReport, Finding, StepState

_COLOURS = {StepState.OK: "green", StepState.WARNING: "yellow", StepState.PROBLEM: "red", StepState.SKIPPED: "dim"}
_WORDS = {StepState.OK: "ok", StepState.WARNING: "ok", StepState.PROBLEM: "problem", StepState.SKIPPED: "not tried"}


def print_check(report: CheckReport, console: Console) -> None:
    console.print(f"[bold]{escape(report.pipeline or 'no pipeline')}[/]", highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2), show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for step in report.steps:
        table.add_row(f"  {step.name}", f"[{_COLOURS[step.state]}]{_WORDS[step.state]}[/]", escape(step.detail))
    console.print(table)
    _print_findings("problems", "red", report.problems, console)
    _print_findings("warnings", "yellow", report.warnings, console)
    if not report.problems:
        console.print("\n[green]ready to run[/]")


def _print_findings(title: str, colour: str, findings: list[Finding], console: Console) -> None:
    if findings:
        console.print(f"\n[bold]{len(findings)} {title if len(findings) > 1 else title[:-1]}[/]")
    for finding in findings:
        console.print(f"  [{colour}]{finding.code}[/] {escape(finding.what)}", highlight=False, soft_wrap=True)
        if finding.fix:
            console.print(f"    fix: {escape(finding.fix)}", highlight=False, soft_wrap=True)
