"""What `penstock dead-letters` does."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.cli.table_orders import parse_table
from penstock.errors import NoTablesError
from penstock.pipeline.config import load_config
from penstock.pipeline.letters.letter import LetterStatus
from penstock.pipeline.letters.store import LetterStore
from penstock.pipeline.orders import change_orders


def print_letters(path: Path, names: list[str], *, every: bool, as_json: bool) -> None:
    config = load_config(path)
    wanted = {str(parse_table(name)) for name in names}
    letters = [
        letter
        for letter in LetterStore(config.sink.root, config.pipeline).load().to_pylist()
        if (every or letter["status"] == LetterStatus.OPEN) and (not wanted or letter["table"] in wanted)
    ]
    if as_json:
        typer.echo(json.dumps([_document(letter) for letter in letters], indent=2, ensure_ascii=False))
        return
    shown = Table("table", "position", "change", "key", "status", "reason", box=None)
    for each in letters:
        cells = (
            each["table"],
            each["position"],
            each["change_type"],
            each["key"] or "",
            each["status"],
            f"{each['code']}: {each['reason']}",
        )
        shown.add_row(*map(escape, cells))
    Console().print(shown)


def order_replay(path: Path, names: list[str]) -> None:
    config = load_config(path)
    found = LetterStore(config.sink.root, config.pipeline).open_counts
    tables = [parse_table(name) for name in names] or list(found)
    strange = [name for name in tables if name not in found]
    if strange:
        raise NoTablesError(f"no letter of {', '.join(map(str, strange))} is open", hint="see `penstock dead-letters list`")
    change_orders(config.state, lambda orders: orders.replay_letters(tables))
    typer.echo(f"ordered: {sum(found[name] for name in tables):,} letters of {', '.join(map(str, tables)) or 'no table'}")


def _document(letter: dict[str, Any]) -> dict[str, Any]:
    """Key and row stay the texts that they are: no reader of JSON keeps all digits."""
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in letter.items()}
