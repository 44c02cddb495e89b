"""Which changes of an epoch break a rule of the Delta table that they go to: a constraint, or that a column takes no nulls.

Delta stops at the first row, and commits or does not: nothing can be tried. But its rules are written in the table, so the rows that the
table would have are put to them: those that MERGE would write, with what they keep of the rows that are there.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.change import COMMIT_VERSION, ORDINAL, ChangeCounts
from penstock.sinks.base import Target
from penstock.sinks.collapse import DELETE, OP, after, collapse, last_truncate
from penstock.sinks.delta.merge import VIEW, merged_rows
from penstock.sinks.delta.protocol import CONSTRAINT
from penstock.sinks.delta.state import Metadata
from penstock.sinks.names import quoted

Refused = dict[tuple[int, int], str]
"""By commit and ordinal, which rule is broken."""

_BROKEN = "penstock_broken"


def rules(metadata: Metadata) -> Mapping[str, str]:
    """What every row must be, by the name under which people know it."""
    checks = {name.removeprefix(CONSTRAINT): text for name, text in metadata.properties.items() if name.startswith(CONSTRAINT)}
    present = {f"{field['name']} NOT NULL": f"{quoted(field['name'])} IS NOT NULL" for field in metadata.fields if not field["nullable"]}
    return {**checks, **present}


def find_refused(
    session: SparkSession, place: str, target: Target, changes: DataFrame, *, counts: ChangeCounts, metadata: Metadata
) -> Refused:
    """Nothing is written. A rule about columns that only the target has is not told here: such a table stops."""
    emptied = last_truncate(changes) if counts.truncates else None
    rest = changes if emptied is None else after(changes, emptied)
    collapse(rest, target.schema, target.key, counts).where(f"{OP} <> '{DELETE}'").createOrReplaceTempView(VIEW)
    rows = session.sql(merged_rows(place, VIEW, target.schema, target.key, keeps=counts.unchanged > 0, is_emptied=emptied is not None))
    broken = [F.when(~F.coalesce(F.expr(text), F.lit(False)), name) for name, text in rules(metadata).items()]
    if not broken:
        return {}
    try:
        found = rows.withColumn(_BROKEN, F.coalesce(*broken)).where(f"{_BROKEN} IS NOT NULL").select(COMMIT_VERSION, ORDINAL, _BROKEN)
    except AnalysisException:
        return {}
    return {(row[COMMIT_VERSION], row[ORDINAL]): f"the rule {row[_BROKEN]!r} of the target" for row in found.collect()}
