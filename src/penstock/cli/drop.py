"""`penstock drop`: the end of a pipeline at its source."""

from __future__ import annotations

from pathlib import Path

import typer

from penstock.pipeline.config import load_config
from penstock.pipeline.dropping import plan_drop, run_drop


def drop_pipeline(path: Path, *, is_sure: bool) -> int:
    """Say what is dropped, ask, and do it; gives back the exit code."""
    config = load_config(path)
    plan = plan_drop(config)
    for each in plan.kept:
        typer.echo(f"stays: {each}")
    if not plan.dropped:
        typer.echo(f"pipeline {config.pipeline} has nothing at its source that could be dropped")
        return 0
    for each in plan.dropped:
        typer.echo(f"{'drops' if is_sure else 'would drop'}: {each}")
    typer.echo(f"stays: the tables and the record of epochs under {config.sink.root}, the state in {config.state}")
    typer.echo("without its slot the pipeline cannot go on from where it is")
    if not is_sure and not typer.confirm("drop it?"):
        return 1
    run_drop(config, plan)
    typer.echo("dropped")
    return 0
