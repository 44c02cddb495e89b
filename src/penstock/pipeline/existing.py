"""Taking over what stands where a table of the pipeline is to go, and the pipeline did not write."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, Recovery
from penstock.pipeline.existing_policy import ExistingPolicy
from penstock.pipeline.orders import TableOrders, change_orders
from penstock.pipeline.states import TableState, TableStatus
from penstock.schema import TableSchema
from penstock.sinks.base import Sink

if TYPE_CHECKING:
    from penstock.pipeline.tables import Tables

_log = logging.getLogger(__name__)


def take_over(tables: Tables, sink: Sink, state: Path) -> None:
    """Do what was said about what is there. What cannot be done fails that table alone."""
    for name, policy in tables.foreign.items():
        if tables.statuses[name].state is TableState.FAILED:
            continue
        try:
            if policy is ExistingPolicy.REPLACE:
                sink.remove_foreign(name)
            else:
                _adopt(tables.schemas[name], sink, state)
        except PenstockError as error:
            if error.recovery is not Recovery.OPERATOR:
                raise
            tables.statuses[name] = TableStatus.failed(error, None)
        else:
            _log.warning("table was taken over", extra={"table": str(name), "policy": policy.value, "place": sink.describe(name)})


def _adopt(schema: TableSchema, sink: Sink, state: Path) -> None:
    """The order comes first: a table that is ours and has none would be emptied before it is copied."""
    change_orders(state, lambda orders: orders.renew([schema.name]))
    needs_shadow = False
    try:
        needs_shadow = sink.adopt(schema)
    finally:
        if not needs_shadow:
            change_orders(state, lambda orders: orders.renewed(schema.name))


def await_copies(tables: Tables, sink: Sink, orders: TableOrders) -> None:
    """Tables that were adopted, and show their former rows until their copies take the place of those."""
    for name in orders.resync & tables.statuses.keys():
        if tables.statuses[name].state is TableState.PENDING and sink.load_target(name) is not None:
            tables.statuses[name] = TableStatus(TableState.SNAPSHOTTING)
