"""`PostgresConnector`: the source connector for Postgres, over logical replication.

A `SpoolCapture` fills the spool and a feed reads it. The spool's consumer `connector` releases acknowledged
positions, which the capture confirms to the server. Batches are change batches: the table's columns, then
those of `penstock.change.METADATA_FIELDS`.

Invariants: reading starts with the first `poll_batch`, never before `restore`; `checkpoint` has no side
effects; only `notify_epoch_committed` releases a position.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

import pyarrow as pa
from typing_extensions import override

from penstock.change import METADATA_FIELDS, change_schema
from penstock.connectors.feed import (
    CONSUMER,
    Begun,
    ChangedRows,
    Copied,
    CopiedRows,
    Feed,
    Reached,
    Rows,
    Step,
)
from penstock.connectors.progress import EpochLedger, Progress
from penstock.connectors.schema_registry import TablesInRegistry
from penstock.connectors.settings import ConnectorSettings, Vitals, assess
from penstock.connectors.source import CapturedSchemas, SourceView, discover, hold_position, inspect_view
from penstock.contracts.connector import (
    ConnectorConfig,
    ConnectorMetrics,
    HealthStatus,
    SourceBatch,
    SourceCheckpoint,
    SourceConnector,
)
from penstock.contracts.schemas import SchemaProvider, SchemaRegistryAware
from penstock.errors import ConnectorError, ConnectorStateError, PenstockError, SpoolError
from penstock.position import Position
from penstock.spool.retention import release
from penstock.spool.status import CaptureStatus, load_status

_log = logging.getLogger(__name__)


class PostgresConnector(SourceConnector):
    """Copies tables, then streams their changes. `config` has the options in
    `connectors.settings.CONNECTOR_OPTIONS`.

    Within one range of WAL the changes are delivered table by table. The changes of one table are in order;
    the order between tables follows only from `_commit_version`. If the offsets of a checkpoint contain only
    `stream`, all tables were delivered up to that position.

    A snapshot that was delivered in part cannot continue after a restart, which takes another snapshot. Each
    incomplete table then starts again with a `truncate`; complete tables are not copied again. During a
    snapshot the server keeps dead rows, so read it without long pauses.
    """

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._checkpoint_requested = threading.Event()
        # Guards the fields that an acknowledgement from another thread reads.
        self._lock = threading.Lock()
        self._settings: ConnectorSettings | None = None
        self._view = SourceView()
        self._is_closed = False
        self._feed: Feed | None = None
        self._end: Callable[[], object] = lambda: None
        self._progress = Progress()
        self._ledger = EpochLedger(0, Position.ZERO)
        self._acknowledged = Position.ZERO
        self._retained = Position.ZERO
        self._requested_at = Position.ZERO
        self._batch_schemas: dict[str, pa.Schema] = {}
        self._records_total = 0
        self._bytes_total = 0
        self._errors_before = 0

    # --- lifecycle ------------------------------------------------------------------------------------------

    @override
    def discover_schema(self, properties: ConnectorConfig) -> None:
        """Determine the schema, with the time limit `discoverSeconds` (default 5)."""
        if self._settings is None:
            self._view = discover(properties)

    @override
    def open(self, config: ConnectorConfig) -> None:
        """Inspect the server and the tables. Missing publication and slot are created when reading starts."""
        if self._is_closed or self._settings is not None:
            state = "has been closed" if self._is_closed else "was already opened"
            raise ConnectorStateError(f"the connector {state}", hint="create another connector")
        settings = ConnectorSettings.from_options(config)
        self._view = inspect_view(settings)
        self._settings = settings

    @override
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        settings = self._opened()
        if self._feed is not None:
            raise ConnectorStateError(
                "a checkpoint cannot be restored after reading has started",
                hint="restore before the first poll_batch",
            )
        progress = Progress.from_checkpoint(checkpoint)
        if progress.floor > Position.ZERO:
            self._acknowledged = hold_position(settings.capture, self._view, checkpoint, progress)
        self._progress = progress
        self._ledger = EpochLedger(checkpoint.epoch, progress.floor)
        self._requested_at = progress.floor

    @override
    def close(self) -> None:
        self._is_closed = True
        self._end()

    # --- reading --------------------------------------------------------------------------------------------

    @override
    def poll_batch(self, max_records: int) -> SourceBatch | None:
        """The next batch; None if there is none now. If a table's schema changed, the method requests a
        checkpoint and returns None once, before the first batch with the new schema.
        """
        if max_records < 1:
            raise ConnectorError(f"max_records is {max_records}", hint="pass max_records of 1 or more")
        settings = self._opened()
        feed = self._feed or self._start(settings)
        while True:
            step = feed.steps.take(max_records)
            if step is None:
                return None
            if not isinstance(step, Rows):
                self._take(step)
                self._request_checkpoint_if_idle(settings)
                continue
            if self._has_new_schema(step):
                feed.steps.put_back(step)
                self._checkpoint_requested.set()
                return None
            self._take(step)
            while (mark := feed.steps.take_mark()) is not None:
                self._take(mark)
            self._records_total += step.records.num_rows
            self._bytes_total += step.records.nbytes
            self._requested_at = self._progress.floor  # a consumer with rows takes checkpoints itself
            return SourceBatch(step.records, str(step.table))

    def _start(self, settings: ConnectorSettings) -> Feed:
        self._progress = self._progress.covering(self._view.tables, copies=settings.takes_snapshot)
        takes_all = not (settings.tables or settings.takes_snapshot)
        feed = Feed(settings.capture, self._progress, self._ready, takes_all=takes_all)
        # The feed does not refer to this object, so the feed is stopped when the connector is garbage
        # collected.
        self._end = weakref.finalize(self, feed.stop)
        feed.start()
        self._feed = feed
        return feed

    def _opened(self) -> ConnectorSettings:
        if self._is_closed:
            raise ConnectorStateError("the connector has been closed", hint="create another connector")
        if self._settings is None:
            raise ConnectorStateError("the connector has not been opened", hint="call open(config) first")
        return self._settings

    def _take(self, step: Step) -> None:
        """Advance the consumer's progress, and the epoch with it."""
        progress = self._progress
        match step:
            case Begun():
                progress = progress.begun(step.floor, step.members)
                self._retained = step.retained
            case CopiedRows():
                pass  # until the table is complete, a restart copies it again
            case Copied():
                progress = progress.copied(step.table, step.fence)
            case ChangedRows():
                progress = progress.changed(step.table, *step.last_commit)
            case Reached():
                progress = progress.reached(step.floor)
        if progress == self._progress and not isinstance(step, Rows):
            return
        with self._lock:
            self._progress = progress
            self._ledger.move(progress.floor)
        if self._feed is not None:
            self._errors_before = self._feed.errors_total
        if isinstance(step, Copied) and not progress.to_copy:
            self._checkpoint_requested.set()

    def _has_new_schema(self, step: Rows) -> bool:
        """Whether the table's rows had another schema before. Returns True once for each new schema."""
        before = self._batch_schemas.get(str(step.table))
        self._batch_schemas[str(step.table)] = step.records.schema
        return before is not None and before != step.records.schema

    def _request_checkpoint_if_idle(self, settings: ConnectorSettings) -> None:
        """Request a checkpoint occasionally even without rows: only acknowledgements let the slot advance."""
        floor = self._progress.floor
        if self._requested_at == Position.ZERO:
            self._requested_at = floor
        if floor - self._requested_at >= max(1, settings.idle_checkpoint_bytes):
            self._requested_at = floor
            self._checkpoint_requested.set()

    # --- checkpoints ----------------------------------------------------------------------------------------

    @override
    def checkpoint(self) -> SourceCheckpoint:
        if self._settings is None:
            return SourceCheckpoint()
        return self._progress.to_checkpoint(self._ledger.last, self._settings.capture.slot, self._view.system)

    @override
    def notify_epoch_committed(self, epoch: int) -> None:
        """Release the floor of the epoch. The release is durable in the spool when this returns; the capture
        confirms it to the server shortly afterwards.
        """
        settings = self._opened()
        with self._lock:
            if epoch > self._ledger.last:
                raise ConnectorError(
                    f"epoch {epoch} is unknown; the last one is {self._ledger.last}",
                    hint="pass the epoch of a checkpoint of this connector",
                )
            floor = self._ledger.floor_of(epoch)
            if floor is None or floor <= self._acknowledged:
                return
            try:
                release(settings.capture.spool, CONSUMER, floor)
            except OSError as error:
                raise SpoolError(f"the spool cannot be written: {error}") from error
            self._acknowledged = floor
            self._ledger.forget_before(epoch)

    @override
    def checkpoint_requested(self) -> threading.Event | None:
        """The event is set before a batch with a new schema, at the end of the snapshot, and after much WAL
        without a captured change.
        """
        return self._checkpoint_requested

    @override
    def data_ready(self) -> threading.Event | None:
        """The event is never set before the first `poll_batch`. It is occasionally set for WAL without a
        captured change.
        """
        return self._ready

    @override
    def supports_replay(self) -> bool:
        """True. Replay works from any checkpoint at or after the last acknowledged epoch. It works from
        earlier checkpoints as long as the spool contains their changes.
        """
        return True

    # --- schemas --------------------------------------------------------------------------------------------

    @override
    def schema(self) -> pa.Schema:
        """With one table: its columns and the metadata columns, as of its last batch. With several tables:
        only the metadata columns.
        """
        declared = self._view.schemas
        if not declared:
            return pa.schema([])
        if len(declared) > 1:
            return pa.schema(METADATA_FIELDS)
        ((table, schema),) = declared.items()
        return self._batch_schemas.get(str(table)) or change_schema(schema)

    @override
    def as_schema_provider(self) -> SchemaProvider | None:
        return self._schemas() if self._settings is not None else None

    @override
    def as_schema_registry_aware(self) -> SchemaRegistryAware | None:
        """The schema registry client; None unless `registryUrl` is set."""
        settings = self._settings
        if settings is None or settings.registry is None:
            return None
        return TablesInRegistry(settings.registry, self._schemas().table_schema)

    def _schemas(self) -> CapturedSchemas:
        assert self._settings is not None
        return CapturedSchemas(self._settings.capture.spool, self._view.schemas, self._view.seen_at)

    # --- health ---------------------------------------------------------------------------------------------

    @override
    def health_check(self) -> HealthStatus:
        """The health; unknown until reading starts, and after `close`."""
        settings, feed = self._settings, self._feed
        if settings is None or feed is None or self._is_closed:
            return HealthStatus.UNKNOWN
        status = self._status()
        vitals = Vitals(
            feed.trouble,
            feed.errors_total - self._errors_before,
            self._behind_bytes(status),
            self._unacknowledged_bytes(),
            None if status is None else status.lag,
        )
        return assess(vitals, settings.thresholds)

    @override
    def metrics(self) -> ConnectorMetrics:
        """`lag` is the number of bytes of WAL from the position up to which all tables were delivered to the
        last known position of the server. `unacknowledged_bytes` is the number of bytes of WAL before the
        former position that the consumer has not acknowledged.
        """
        status, progress = self._status(), self._progress
        custom = {
            "epoch": float(self._ledger.last),
            "tables_to_copy": float(len(progress.to_copy)),
            "unacknowledged_bytes": float(self._unacknowledged_bytes()),
        }
        if status is not None and status.lag is not None and status.lag.retained_bytes is not None:
            custom["retained_wal_bytes"] = float(status.lag.retained_bytes)
        errors = self._feed.errors_total if self._feed is not None else 0
        return ConnectorMetrics(
            self._records_total, self._bytes_total, errors, self._behind_bytes(status), custom
        )

    def _status(self) -> CaptureStatus | None:
        """The last status that the capture wrote; None if there is none."""
        if self._settings is None or self._feed is None:
            return None
        try:
            return load_status(self._settings.capture.spool)
        except (OSError, PenstockError) as error:
            _log.info("capture status not read", extra={"error": type(error).__name__})
            return None

    def _behind_bytes(self, status: CaptureStatus | None) -> int | None:
        floor = self._progress.floor
        if status is None or status.lag is None or floor == Position.ZERO:
            return None
        return max(0, status.sealed - floor + status.lag.behind_bytes)

    def _unacknowledged_bytes(self) -> int:
        """WAL that was delivered and not acknowledged. Before the first acknowledgement, it is counted from
        the position after which the source retains all changes; before reading starts, that is unknown.
        """
        since = max(self._retained, self._acknowledged)
        return max(0, self._progress.floor - since) if since > Position.ZERO else 0
