"""An Iceberg table's columns as they become: in a transaction that the rows which need them go into too, so that both are one commit.

Columns are known by numbers that never change: names, and types that hold more, are metadata alone. A column that is added is null in the
files that are there, or what the table says, where its format lets it say so. Where neither is what the source gave its rows, those files
are written anew, by the same commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa

from penstock.sinks.evolution import Evolution
from penstock.sinks.iceberg.catalog import IcebergCatalog, LoadedTable, failing
from penstock.sinks.iceberg.names import stored_name
from penstock.sinks.layout import Mode, added_names

_SAYS_DEFAULTS = 3


@dataclass(frozen=True, slots=True)
class Past:
    """How rows that are in the table as it was are rows of the table as it becomes."""

    names: Mapping[str, str] = field(default_factory=dict)
    """What a column was called, by its name from then on, where that differs."""
    added: frozenset[str] = frozenset()
    fills: Mapping[str, pa.Scalar] = field(default_factory=dict)
    """What the rows get in columns that are added, where it is not null."""
    is_rewritten: bool = False
    """Whether the files that are there do not show that, whatever the table says."""


def past_of(evolution: Evolution, format_version: int) -> Past:
    fills = {each.name: each.fill for each in evolution.added if each.fill.is_valid}
    names, added = {new: old for old, new in evolution.renamed.items()}, frozenset(each.name for each in evolution.added)
    return Past(names, added, fills, not all(_is_said(fill, format_version) for fill in fills.values()))


def _is_said(fill: pa.Scalar, format_version: int) -> bool:
    """Whether a table of this format can say so of a column, and no reader can take it for something else."""
    kind = fill.type
    is_plain = pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_boolean(kind)
    return bool(is_plain and fill.is_valid and format_version >= _SAYS_DEFAULTS)


def evolve_table(catalog: IcebergCatalog, loaded: LoadedTable, evolution: Evolution, mode: Mode) -> LoadedTable:
    """The table with the columns that it is to have; nothing is committed. `SinkError` or `ValueError` if it cannot have them."""
    with failing(f"altering {loaded.location}"):
        transaction = catalog.begin(loaded)
        former = {new: old for old, new in evolution.renamed.items()}
        update = transaction.updateSchema()
        for name, arrow_type in evolution.widened.items():
            update.updateColumn(former.get(name, name), catalog.java_type(arrow_type))
        for old, new in evolution.renamed.items():
            update.renameColumn(old, new)
        update.commit()
        # By a step of its own: a name that is given again is free only then.
        update = transaction.updateSchema()
        following = next((each for each in loaded.schema.names if each in added_names(mode)), None)
        for added in evolution.added:
            literal = catalog.literal(added.fill.as_py()) if _is_said(added.fill, loaded.format_version) else None
            update.addColumn(None, added.name, catalog.java_type(added.arrow_type), None, literal)
            if following is not None:
                update.moveBefore(added.name, stored_name(following, mode))
        update.commit()
        return replace(loaded, transaction=transaction, schema=catalog.columns(transaction.table().schema(), mode))
