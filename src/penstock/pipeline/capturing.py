"""The capture of a configuration as a process of its own: what it captures, and who reads behind it."""

from __future__ import annotations

from penstock.capture.provision import inspect_coverage
from penstock.capture.settings import CaptureSettings
from penstock.errors import ConfigError
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.epochs import EpochLog
from penstock.pipeline.standing import slot_missing
from penstock.pipeline.tables import check_selected, select_tables
from penstock.postgres.connection import connect
from penstock.postgres.slot import inspect_slot
from penstock.spark.lock import is_locked
from penstock.spool.consumers import forget, inspect_consumers
from penstock.spool.layout import SpoolLayout

ALIVE_SECONDS = 30.0
"""A consumer that has released something within this time runs."""


def plan_capture(config: PipelineConfig) -> CaptureSettings:
    """What `penstock capture` runs. Publication and slot are created for the tables of this configuration if no capture ever ran.

    By triggers, it reads what those of the tables that pipelines have added write down.

    Tables of other pipelines, and tables that come later, are added to the publication by the pipelines that mirror them: who copies a
    table must know whether its changes were published before.
    """
    if config.source.process != "separate":
        raise ConfigError(
            "source.process is embedded: every run of this pipeline captures by itself",
            hint="set source.process: separate in every configuration that reads this slot, or leave the capture to `penstock run`",
        )
    address = config.source.address()
    if config.source.capture == "trigger":
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
    report = inspect_coverage(address, config.publication, wanted, old_rows=config.source.old_rows)
    blocked = {name for blocker in report.blockers for name in blocker.tables}
    return config.capture_settings(tables=[name for name in wanted if name not in blocked] or wanted)


def forget_consumer(config: PipelineConfig, name: str) -> None:
    """Let the capture confirm and delete what `name` has not released: it will not read again, or only after a copy of its tables anew."""
    found = {each.name: each for each in inspect_consumers(config.spool)}
    if name not in found:
        raise ConfigError(f"the spool at {config.spool} has no consumer {name!r}", hint=f"those that it has: {', '.join(found) or 'none'}")
    age_seconds = found[name].age_seconds
    if is_locked(SpoolLayout(config.spool).consumer_lock(name)):
        raise ConfigError(f"consumer {name} runs", hint="stop that pipeline, and say it again")
    if age_seconds < ALIVE_SECONDS:
        raise ConfigError(
            f"consumer {name} runs: it released {found[name].released} only {age_seconds:.0f} s ago",
            hint=f"stop that pipeline, wait {ALIVE_SECONDS:.0f} s, and say it again",
        )
    forget(config.spool, name)
