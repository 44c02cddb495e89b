"""Which files have what was refused of a copy: by the table that it was read from, as a letter is of one table's shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from penstock.pipeline.letters.copy import RefusedRows, chunk_basket, made_basket
from penstock.pipeline.snapshots.repair import KeyTask
from penstock.pipeline.snapshots.state import ChunkRecord, SnapshotPlan


def gather_refused(
    plan: SnapshotPlan, records: Path, chunks: Mapping[int, ChunkRecord], reread: Sequence[KeyTask], unmade: Sequence[str]
) -> list[RefusedRows]:
    """Of all `chunks`, by number, of what was `reread`, and of what was read again and could not be made the target's (`unmade`)."""
    found = []
    for part in plan.outline.parts:
        name = part.schema.name
        own = [(number, record.fence) for number, record in sorted(chunks.items()) if plan.chunks[number].schema.name == name]
        baskets = (basket(records, number, fence) for number, fence in own for basket in (chunk_basket, made_basket))
        again = _existing(task.basket for task in reread if task.outline.schema.name == name)
        refused = RefusedRows(part.schema, _existing(baskets), (*again, *unmade), plan.outline.constants(part))
        if refused.chunks or refused.repaired:
            found.append(refused)
    return found


def _existing(paths: Iterable[Path]) -> tuple[str, ...]:
    return tuple(str(path) for path in paths if path.exists())
