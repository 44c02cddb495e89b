"""The MERGE that applies a collapsed epoch."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.change import EXACT
from penstock.sinks.collapse import DELETE, KEPT, OP, match_column
from penstock.sinks.names import quoted, text_literal


def merge_statement(place: str, view: str, key: Sequence[str], columns: Sequence[str], *, keeps: bool) -> str:
    """MERGE `view` (what `collapse` gives) into the Delta table at `place`. `keeps`: some rows leave values as they are."""
    on = " AND ".join(f"t.{quoted(name)} = s.{match_column(index)}" for index, name in enumerate(key))
    kept = [name for name in columns if keeps and name not in key]
    updates = [f"t.{quoted(name)} = {_updated(name, name in kept)}" for name in columns]
    updates.append(f"t.{quoted(EXACT)} = {_exact(keeps)}")
    inserts = [_inserted(name, name in kept) for name in columns] + [f"s.{quoted(EXACT)}"]
    names = ", ".join([*(quoted(name) for name in columns), quoted(EXACT)])
    return (
        f"MERGE INTO delta.{quoted(place)} t USING {view} s ON {on} "
        f"WHEN MATCHED AND s.{OP} = '{DELETE}' THEN DELETE "
        f"WHEN MATCHED THEN UPDATE SET {', '.join(updates)} "
        f"WHEN NOT MATCHED AND s.{OP} <> '{DELETE}' THEN INSERT ({names}) VALUES ({', '.join(inserts)})"
    )


def _is_kept(name: str) -> str:
    return f"array_contains(s.{KEPT}, {text_literal(name)})"


def _updated(name: str, may_be_kept: bool) -> str:
    value = f"s.{quoted(name)}"
    return f"CASE WHEN {_is_kept(name)} THEN t.{quoted(name)} ELSE {value} END" if may_be_kept else value


def _inserted(name: str, may_be_kept: bool) -> str:
    """A value that only the target could have, and the target has no such row: that must not become a null in silence."""
    value = f"s.{quoted(name)}"
    if not may_be_kept:
        return value
    return f"CASE WHEN {_is_kept(name)} THEN raise_error('PEN-3002: a row that must be in the target is not') ELSE {value} END"


def _exact(keeps: bool) -> str:
    """The exact texts of kept values stay with them."""
    exact = quoted(EXACT)
    if not keeps:
        return f"s.{exact}"
    stay = f"map_filter(coalesce(t.{exact}, map()), (k, v) -> array_contains(s.{KEPT}, k))"
    whole = f"map_concat({stay}, coalesce(s.{exact}, map()))"
    return f"CASE WHEN s.{KEPT} IS NULL THEN s.{exact} WHEN size({whole}) > 0 THEN {whole} END"
