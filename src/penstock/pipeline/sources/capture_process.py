"""The separate capture process (`penstock capture`): its settings, and the monitoring of captures by the
pipeline.

An embedded capture starts and ends with the streaming query. It is an error if another process then captures
into the same spool. A separate capture starts and ends independently, and the pipeline waits for it.
"""

from __future__ import annotations

import time

from penstock.capture.factory import check_shared, missing_capture
from penstock.capture.provision import inspect_coverage
from penstock.capture.settings import CaptureSettings
from penstock.config.model import PipelineConfig
from penstock.errors import CaptureMissingError, ConfigError, SpoolLockedError
from penstock.pipeline.epoch_log import EpochLog
from penstock.pipeline.sources.adapter import source_adapter
from penstock.pipeline.sources.resume_checks import slot_missing
from penstock.pipeline.table_selection import check_selected, select_tables
from penstock.postgres.connection import connect
from penstock.postgres.slot import inspect_slot
from penstock.spool.manifest import SpoolLayout
from penstock.spool.ownership import SpoolLock, is_spool_locked
from penstock.spool.retention import inspect_consumers, remove_consumer
from penstock.spool.status import load_status
from penstock.storage.locks import is_locked_by_jvm

ALIVE_SECONDS = 30.0
"""A consumer that released a position within this time counts as running."""


def plan_capture(config: PipelineConfig) -> CaptureSettings:
    """Return the settings of `penstock capture`. On the first start, the capture creates publication and slot
    for the tables of this configuration.

    Later, each pipeline adds the tables of its configuration to the publication. A pipeline does this itself,
    because when it copies a table, it must know the position from which the table's changes are published.

    With triggers, the capture reads the changes of all tables that have the triggers of its change table,
    whichever pipeline selects them.
    """
    if config.source.process != "separate":
        raise ConfigError(
            "source.process is embedded: every run of this pipeline has its own capture",
            hint="set source.process: separate in every configuration that reads this slot, or leave the "
            "capture to `penstock run`",
        )
    address = config.source.address()
    if not source_adapter(config).needs_tables_first:
        return config.capture_settings()
    with connect(address, "penstock capture") as connection:
        selection = select_tables(connection, config, asks_spark=False)
        check_selected(selection, address.describe())
        has_slot = inspect_slot(connection, config.slot) is not None
    if has_slot:
        return config.capture_settings()
    if EpochLog(config.sink.root, config.pipeline).last() is not None:
        raise slot_missing(config)
    wanted = [table.name for table in selection.sources]
    report = inspect_coverage(
        address, config.publication, wanted, old_rows=config.source.old_rows, unkeyed=config.unkeyed(wanted)
    )
    blocked = {name for blocker in report.blockers for name in blocker.tables}
    return config.capture_settings(tables=[name for name in wanted if name not in blocked] or wanted)


def forget_consumer(config: PipelineConfig, name: str) -> None:
    """Remove the consumer `name`, so that the capture confirms and deletes changes without waiting for it. A
    pipeline with that name must resync its tables before it can continue.
    """
    found = {each.name: each for each in inspect_consumers(config.spool)}
    if name not in found:
        raise ConfigError(
            f"the spool at {config.spool} has no consumer {name!r}",
            hint=f"its consumers: {', '.join(found) or 'none'}",
        )
    age_seconds = found[name].age_seconds
    if is_locked_by_jvm(SpoolLayout(config.spool).consumer_lock(name)):
        raise ConfigError(f"consumer {name} is running", hint="stop that pipeline, and run the command again")
    if age_seconds < ALIVE_SECONDS:
        raise ConfigError(
            f"consumer {name} is running: it released {found[name].released} only {age_seconds:.0f} s ago",
            hint=f"stop that pipeline, wait {ALIVE_SECONDS:.0f} s, and run the command again",
        )
    remove_consumer(config.spool, name)


_POLL_SECONDS = 0.1
_END_SECONDS = 10.0
_PATIENCE_SECONDS = 60.0


class CaptureMonitor:
    """Monitors the embedded or separate capture of one run."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._missing: CaptureMissingError | None = None
        self._missing_since = 0.0

    @property
    def is_separate(self) -> bool:
        return self._config.source.process == "separate"

    def check(self) -> None:
        """Check the capture before an attempt of the run. Raises an error if a separate capture has other
        settings, or if another process writes to the spool of an embedded capture.
        """
        config = self._config
        if self.is_separate:
            check_shared(config.spool, config.slot, config.origin, config.type_policy)
        elif (other := self._wait_for_end()) is not None:
            hint = (
                "stop that process; if it is a `penstock capture` for several pipelines, set source.process: "
                "separate instead"
            )
            raise SpoolLockedError(other.message, hint=hint)

    def trouble(self) -> str | None:
        """Return the reason why no changes reach the spool now; None if there is no known problem. The run
        can continue, because a capture retries by itself.
        """
        if self.is_separate:
            self._check_process()
            if self._missing is not None:
                return f"{self._missing.message}: {self._missing.hint}"
        status = load_status(self._config.spool)
        return status.failure.message if status is not None and status.failure is not None else None

    def check_patience(self) -> None:
        """For `run --once`: raise an error if the separate capture has not run for a minute."""
        if self._missing is not None and time.monotonic() - self._missing_since > _PATIENCE_SECONDS:
            raise self._missing

    def settle(self) -> None:
        """Wait until the embedded capture has ended. Called after the query has stopped, because Spark does
        not wait for the capture, which sends its last confirmation at its end.
        """
        if not self.is_separate:
            self._wait_for_end()

    def _check_process(self) -> None:
        before, self._missing = self._missing, missing_capture(self._config.spool)
        if before is None:
            self._missing_since = time.monotonic()

    def _wait_for_end(self) -> SpoolLockedError | None:
        """Wait up to ten seconds until no process writes to the spool. Returns an error that names the
        process if one still does.
        """
        deadline = time.monotonic() + _END_SECONDS
        while is_spool_locked(self._config.spool):
            try:
                with SpoolLock(self._config.spool):
                    return None
            except SpoolLockedError as error:
                if time.monotonic() > deadline:
                    return error
                time.sleep(_POLL_SECONDS)
        return None
