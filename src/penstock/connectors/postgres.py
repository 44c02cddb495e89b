"""`PostgresConnector`: the contract of a source connector, for Postgres, over logical replication.

A view of the one engine: a `SpoolCapture` fills the spool, a feed reads it, and the spool's consumer `connector` releases what has been
acknowledged, which the capture then confirms to the server. Batches are change batches: the table's columns, then those of
`penstock.change.METADATA_FIELDS`.

Three things hold: reading starts with the first `poll_batch`, never before `restore`; `checkpoint` only says where the consumer stands; and
`notify_epoch_committed` is the only place from which a position is released.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

import pyarrow as pa
from typing_extensions import override

from penstock.change import METADATA_FIELDS, change_schema
from penstock.connectors.epochs import EpochLedger
from penstock.connectors.feed import CONSUMER, Feed
from penstock.connectors.health import Vitals, assess
from penstock.connectors.progress import Progress
from penstock.connectors.registry import TablesInRegistry
from penstock.connectors.rows import Begun, ChangedRows, Copied, CopiedRows, Reached, Rows, Step
from penstock.connectors.schemas import CapturedSchemas
from penstock.connectors.settings import ConnectorSettings
from penstock.connectors.source import SourceView, discover, hold_place, inspect_view
from penstock.contracts.connector import ConnectorConfig, ConnectorMetrics, HealthStatus, SourceBatch, SourceCheckpoint, SourceConnector
from penstock.contracts.schemas import SchemaProvider, SchemaRegistryAware
from penstock.errors import ConnectorError, ConnectorStateError, PenstockError, SpoolError
from penstock.position import Position
from penstock.spool.consumers import release
from penstock.spool.status import CaptureStatus, load_status

_log = logging.getLogger(__name__)


class PostgresConnector(SourceConnector):
    """Copies some tables, then follows them. `config` has the options of a capture and those of `connectors.settings.OPTIONS`.

    Of one range of the log, the changes come table by table, so order is kept within a table, and between tables only `_commit_version`
    tells it. Wherever a checkpoint's offsets hold nothing but `stream`, all tables have been given out up to that one position.

    A snapshot that was given out in part cannot be gone on with under another one: after a restart, tables that are not whole begin with a
    `truncate`, and those that are whole are left alone. As long as it lasts, the server keeps dead rows: so read it through.
    """

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._wants_checkpoint = threading.Event()
        # Guards what an acknowledgement from another thread looks at.
        self._lock = threading.Lock()
        self._settings: ConnectorSettings | None = None
        self._view = SourceView()
        self._is_closed = False
        self._feed: Feed | None = None
        self._end: Callable[[], object] = lambda: None
        self._progress = Progress()
        self._ledger = EpochLedger(0, Position.ZERO)
        self._acknowledged = Position.ZERO
        self._asked_at = Position.ZERO
        self._held: Step | None = None
        self._shapes: dict[str, pa.Schema] = {}
        self._records_total = 0
        self._bytes_total = 0
        self._errors_before = 0

    # --- lifecycle ------------------------------------------------------------------------------------------------------

    @override
    def discover_schema(self, properties: ConnectorConfig) -> None:
        """Within `discoverSeconds`, 5 by default."""
        if self._settings is None:
            self._view = discover(properties)

    @override
    def open(self, config: ConnectorConfig) -> None:
        """Look at the server and at the tables. Publication and slot are made when reading starts, if they are not there."""
        if self._settings is not None or self._is_closed:
            raise ConnectorStateError("the connector has been opened before", hint="make another one")
        settings = ConnectorSettings.from_options(config)
        self._view = inspect_view(settings)
        self._settings = settings

    @override
    def restore(self, checkpoint: SourceCheckpoint) -> None:
        settings = self._opened()
        if self._feed is not None:
            raise ConnectorStateError("reading has started, and a checkpoint comes too late", hint="restore before the first poll_batch")
        progress = Progress.from_checkpoint(checkpoint)
        if progress.floor > Position.ZERO:
            self._acknowledged = hold_place(settings.capture, self._view, checkpoint, progress)
        self._progress = progress
        self._ledger = EpochLedger(checkpoint.epoch, progress.floor)
        self._asked_at = progress.floor

    @override
    def close(self) -> None:
        self._is_closed = True
        self._end()

    # --- reading --------------------------------------------------------------------------------------------------------

    @override
    def poll_batch(self, max_records: int) -> SourceBatch | None:
        """Before a batch of another shape than the last one of its table, it asks for a checkpoint and gives None, once."""
        if max_records < 1:
            raise ConnectorError(f"a batch of {max_records} records was asked for", hint="ask for one or more")
        settings = self._opened()
        feed = self._feed or self._start(settings)
        while True:
            step, self._held = self._held or feed.steps.take(max_records), None
            if step is None:
                return None
            if not isinstance(step, Rows):
                self._take(step)
                self._ask_if_idle(settings)
                continue
            if self._is_reshaped(step):
                self._held = step
                self._wants_checkpoint.set()
                return None
            self._take(step)
            while (mark := feed.steps.take_mark()) is not None:
                self._take(mark)
            self._records_total += step.records.num_rows
            self._bytes_total += step.records.nbytes
            self._asked_at = self._progress.floor  # who gets rows knows when to take a checkpoint
            return SourceBatch(step.records, str(step.table))

    def _start(self, settings: ConnectorSettings) -> Feed:
        self._progress = self._progress.covering(self._view.tables, copies=settings.takes_snapshot)
        takes_all = not (settings.tables or settings.takes_snapshot)
        feed = Feed(settings.capture, self._progress, self._ready, takes_all=takes_all)
        # The feed does not know this object: when the last reference to it goes, the feed ends.
        self._end = weakref.finalize(self, feed.stop)
        feed.start()
        self._feed = feed
        return feed

    def _opened(self) -> ConnectorSettings:
        if self._is_closed:
            raise ConnectorStateError("the connector has been closed", hint="make another one")
        if self._settings is None:
            raise ConnectorStateError("the connector has not been opened", hint="call open(config) first")
        return self._settings

    def _take(self, step: Step) -> None:
        """The consumer's place moves, and with it the epoch."""
        progress = self._progress
        match step:
            case Begun():
                progress = progress.begun(step.floor, step.members)
            case CopiedRows():
                pass  # until the table is whole, a restart begins it anew
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
            self._wants_checkpoint.set()

    def _is_reshaped(self, step: Rows) -> bool:
        """Whether the table's rows had another shape before; asked once for each shape."""
        before = self._shapes.get(str(step.table))
        self._shapes[str(step.table)] = step.records.schema
        return before is not None and before != step.records.schema

    def _ask_if_idle(self, settings: ConnectorSettings) -> None:
        """An acknowledgement is all that lets the slot go on; so one is asked for now and then, also where no batch gives reason to."""
        floor = self._progress.floor
        if self._asked_at == Position.ZERO:
            self._asked_at = floor
        if floor - self._asked_at >= max(1, settings.idle_checkpoint_bytes):
            self._asked_at = floor
            self._wants_checkpoint.set()

    # --- where it stands ------------------------------------------------------------------------------------------------

    @override
    def checkpoint(self) -> SourceCheckpoint:
        if self._settings is None:
            return SourceCheckpoint()
        return self._progress.to_checkpoint(self._ledger.last, self._settings.capture.slot, self._view.system)

    @override
    def notify_epoch_committed(self, epoch: int) -> None:
        """Written to the spool when this returns; the server knows it a moment later."""
        settings = self._opened()
        with self._lock:
            if epoch > self._ledger.last:
                raise ConnectorError(
                    f"epoch {epoch} has not been given out; the last one is {self._ledger.last}", hint="tell the epoch of a checkpoint"
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
        """Raised before a batch of another shape, at the end of the snapshot, and when much log without a change of ours has passed."""
        return self._wants_checkpoint

    @override
    def data_ready(self) -> threading.Event | None:
        """Before the first `poll_batch` it is never set. Now and then it is set for log that holds nothing of ours."""
        return self._ready

    @override
    def supports_replay(self) -> bool:
        """From any checkpoint at or after the last acknowledged epoch; from earlier ones as far as the spool still reaches."""
        return True

    # --- schemas --------------------------------------------------------------------------------------------------------

    @override
    def schema(self) -> pa.Schema:
        """Of one table, its columns and the metadata, as of its last batch; of several, the metadata alone."""
        declared = self._view.schemas
        if not declared:
            return pa.schema([])
        if len(declared) > 1:
            return pa.schema(METADATA_FIELDS)
        ((table, schema),) = declared.items()
        return self._shapes.get(str(table)) or change_schema(schema)

    @override
    def as_schema_provider(self) -> SchemaProvider | None:
        return self._schemas() if self._settings is not None else None

    @override
    def as_schema_registry_aware(self) -> SchemaRegistryAware | None:
        """If `registryUrl` is set."""
        settings = self._settings
        if settings is None or settings.registry is None:
            return None
        return TablesInRegistry(settings.registry, self._schemas().table_schema)

    def _schemas(self) -> CapturedSchemas:
        assert self._settings is not None
        return CapturedSchemas(self._settings.capture.spool, self._view.schemas, self._view.seen_at)

    # --- how it is ------------------------------------------------------------------------------------------------------

    @override
    def health_check(self) -> HealthStatus:
        """Unknown until reading starts, and after `close`."""
        settings, feed = self._settings, self._feed
        if settings is None or feed is None or self._is_closed:
            return HealthStatus.UNKNOWN
        status = self._status()
        vitals = Vitals(
            feed.trouble, feed.errors_total - self._errors_before, self._behind_bytes(status), None if status is None else status.lag
        )
        return assess(vitals, settings.thresholds)

    @override
    def metrics(self) -> ConnectorMetrics:
        """`lag` is in bytes of the log, from what all tables have been given out of, to where the server was at the last look."""
        status, progress = self._status(), self._progress
        custom = {
            "epoch": float(self._ledger.last),
            "tables_to_copy": float(len(progress.to_copy)),
            "unacknowledged_bytes": float(max(0, progress.floor - self._acknowledged)) if self._acknowledged > Position.ZERO else 0.0,
        }
        if status is not None and status.lag is not None and status.lag.retained_bytes is not None:
            custom["retained_wal_bytes"] = float(status.lag.retained_bytes)
        errors = self._feed.errors_total if self._feed is not None else 0
        return ConnectorMetrics(self._records_total, self._bytes_total, errors, self._behind_bytes(status), custom)

    def _status(self) -> CaptureStatus | None:
        """What the capture last said of itself."""
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
