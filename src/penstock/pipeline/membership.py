"""Whether a table has been in the publication all the while.

The server decides by its catalog as of each change what is published. A table that was taken out and put in again between two runs, or put
in with another row filter, looks as before, and the changes in between are in no log. So the state directory holds which act put each table
in. A state directory that is lost takes this knowledge along, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from penstock.errors import SpoolCorruptError, TargetRewoundError
from penstock.pipeline.formats import check_format
from penstock.pipeline.states import TableStatus
from penstock.pipeline.tables import Tables
from penstock.schema import TableName
from penstock.spool import storage

_FILE = "membership.json"
_FORMAT = 1

Same = Callable[[str, str], bool]
"""Whether one act is the other, as far as it matters."""


def load_memberships(state: Path) -> dict[TableName, str]:
    """What the last run saw; empty before the first."""
    data = storage.read_bytes(state / _FILE)
    if data is None:
        return {}
    try:
        document = json.loads(data)
        check_format(document, _FORMAT, state / _FILE)
        return {TableName.parse(name): str(token) for name, token in document["tables"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "remove the file if the publication has not been changed since the last run"
        raise SpoolCorruptError(f"{state / _FILE} cannot be understood", hint=hint) from error


def save_memberships(state: Path, memberships: Mapping[TableName, str]) -> None:
    tables = {str(name): token for name, token in sorted(memberships.items())}
    storage.replace_bytes(state / _FILE, json.dumps({"format": _FORMAT, "tables": tables}).encode())


def fail_rejoined(
    tables: Tables, recorded: Mapping[TableName, str], found: Mapping[TableName, str], describe: Callable[[TableName], str]
) -> dict[TableName, str]:
    """Fail the filled tables that are not in the publication by the same act as before; gives back what is to be recorded.

    What has failed keeps its old entry, so that it fails again if this run ends before anybody has written that down.
    """
    left = departures(recorded, found, [source for name in tables.filled for source in tables.sources_of(name)])
    for name in tables.filled:
        for source in tables.sources_of(name):
            if source in left:
                error = departed(source, left[source], name, describe(name))
                tables.statuses[name] = TableStatus.failed(error, tables.statuses[name].applied)
    capturable = set(tables.capturable)
    known = {source for name in tables.statuses for source in tables.sources_of(name)}
    kept = {name: token for name, token in recorded.items() if name in known and name not in capturable}
    return kept | {name: token for name, token in found.items() if name in capturable}


def departures(
    recorded: Mapping[TableName, str], found: Mapping[TableName, str], tables: Iterable[TableName], is_same: Same | None = None
) -> dict[TableName, str]:
    """Those of `tables` that have not been captured all the while, and what became of them, in words."""
    same = is_same or _is_same
    return {
        name: "was taken out of the publication and put in again" if name in found else "was taken out of the publication"
        for name in tables
        if name in recorded and not (name in found and same(recorded[name], found[name]))
    }


def departed(source: TableName, reason: str, name: TableName, target: str) -> TargetRewoundError:
    """For the table `name` of the pipeline, which is that table of the source, or partly so."""
    return TargetRewoundError(
        f"table {source} {reason}, so changes of it may be missing",
        hint=f"penstock tables resync CONFIG {name}, or remove {target} and run again to copy the table anew",
    )


def _is_same(recorded: str, found: str) -> bool:
    """Former versions recorded `all` for a table that is published by its schema; which act that was is learnt now."""
    publication, _, act = recorded.partition("/")
    return found == recorded or (act == "all" and found.startswith(f"{publication}/schema-"))
