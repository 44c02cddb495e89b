"""The part of a check that looks at this machine: the state directory, a capture of its own, the target, Spark, Java."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.capture.following import check_shared, missing_capture
from penstock.errors import EnvironmentUnfitError
from penstock.pipeline.checks.findings import Step
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.sink_config import PostgresConfig
from penstock.postgres.connection import Connection, connect, tls_weakness
from penstock.postgres.target_ddl import probe_target
from penstock.sinks.directories import DEAD_LETTERS, SCRATCH, SNAPSHOTS
from penstock.spool.storage import is_open_to_others, make_directory, remove_tree, replace_bytes

_LEAST_FREE_BYTES = 256 << 20


def check_places(config: PipelineConfig) -> list[Step]:
    capture = [_check_capture(config)] if config.source.process == "separate" else []
    return [_check_state(config), *capture, _check_sink(config), _check_spark(config), _check_java()]


def _check_state(config: PipelineConfig) -> Step:
    step = Step("state directory", str(config.state))
    _warn_of_readers(step, config)
    with step.catching(), made_place(config.spool) as place:
        _write_durably(place)
        free = shutil.disk_usage(place).free
        step.detail = f"{config.state}, {free >> 20:,} MiB free"
        if free < _LEAST_FREE_BYTES:
            raise EnvironmentUnfitError(f"the disk of {config.state} has only {free >> 20} MiB left", hint="make room, or change state:")
        if free < config.max_spool_bytes:
            fix = "make room, lower max_spool_bytes:, or change state:"
            step.warn(
                "spool-larger-than-disk", f"the spool may grow to {config.max_spool_bytes >> 20:,} MiB, more than its disk has left", fix
            )
    return step


def _warn_of_readers(step: Step, config: PipelineConfig) -> None:
    """Directories with rows of the source, made by hand or by a version that left their mode to the umask."""
    own = [config.sink.root / each / config.pipeline for each in (DEAD_LETTERS, SNAPSHOTS, SCRATCH)]
    for place in dict.fromkeys([config.state, config.spool, *own]):
        if is_open_to_others(place):
            what = f"{place} holds rows of the source, and other users of this machine may read it"
            step.warn("readable-by-others", what, f"chmod -R go-rwx {shlex.quote(str(place))}")


def _check_capture(config: PipelineConfig) -> Step:
    """A run waits for a capture that is not there, so its absence is only told."""
    step = Step("capture", f"into {config.spool}")
    with step.catching():
        missing = missing_capture(config.spool)
        if missing is not None:
            step.warn("capture-not-running", missing.message, missing.hint)
        check_shared(config.spool, config.slot, config.origin, config.type_policy)
    return step


def _check_sink(config: PipelineConfig) -> Step:
    """Write a tiny table the way that a snapshot's files are committed: without Spark."""
    root = config.sink.root
    if config.sink.postgres is not None:
        return _check_postgres(config.sink.postgres)
    step = Step("target", str(root))
    with step.catching(), made_place(root, shared=True) as place:
        if config.sink.parquet is not None:
            _write_durably(place)
            return step
        if config.sink.iceberg is not None:
            _write_durably(place)
            step.detail = f"{root}, catalog {config.sink.iceberg.catalog}"
            return step
        probe = place / f"_penstock_check_{os.getpid()}"
        try:
            _write_table(probe)
        finally:
            remove_tree(probe)
    return step


def _check_postgres(config: PostgresConfig) -> Step:
    """Make a table where tables are made, in a transaction that does not commit; and write where epochs are recorded."""
    step = Step("target", "Postgres")
    with step.catching():
        address = config.address()
        step.detail = address.describe()
        with connect(address, "penstock check") as connection:
            warn_of_tls(step, connection, "sink.postgres.dsn")
        probe_target(address)
        with made_place(config.state) as place:
            _write_durably(place)
    return step


def warn_of_tls(step: Step, connection: Connection, key: str) -> None:
    weakness = tls_weakness(connection)
    if weakness is not None:
        fix = f"sslmode=verify-full in {key}, with sslrootcert=system or the file of the certificate authority"
        step.warn("tls-not-verified", weakness, fix)


def _check_spark(config: PipelineConfig) -> Step:
    """Whether the sink has a package for this Spark. Whoever names packages of their own is taken at their word."""
    step = Step("spark")
    with step.catching():
        from penstock.pipeline.sinks import sink_packages
        from penstock.spark.packages import spark_minor

        step.detail = f"Spark {spark_minor()}"
        packages = config.spark.packages or sink_packages(config)
        step.detail = ", ".join([step.detail, *packages])
    return step


def _check_java() -> Step:
    step = Step("java")
    with step.catching():
        from penstock.spark.java import find_java, java_major

        java = find_java()
        step.detail = f"Java {java_major(java)}, {java}"
    return step


def _write_durably(place: Path) -> None:
    probe = place / f"penstock_check_{os.getpid()}"
    try:
        replace_bytes(probe, b"check")
        probe.unlink()
    except OSError as error:
        hint = "choose another place, or let this user write there"
        raise EnvironmentUnfitError(f"{place} cannot be written to: {error.strerror}", hint=hint) from error


def _write_table(path: Path) -> None:
    try:
        import pyarrow as pa
        from deltalake import DeltaTable, write_deltalake
        from deltalake.exceptions import DeltaError
    except ImportError as error:
        raise EnvironmentUnfitError("the package deltalake is not installed", hint="pip install 'penstock[delta]'") from error
    try:
        write_deltalake(str(path), pa.table({"id": pa.array([1], pa.int64())}))
        DeltaTable(str(path)).version()
    except (DeltaError, OSError) as error:
        reason = " ".join(str(error).split())
        raise EnvironmentUnfitError(
            f"no Delta table can be written under {path.parent}: {reason}", hint="change sink.delta.path"
        ) from error


@contextmanager
def made_place(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """The directory, for the length of the block; what had to be created for it is removed again."""
    try:
        created = [each for each in (path, *path.parents) if not each.exists()]
        make_directory(path, shared=shared)
    except OSError as error:
        raise EnvironmentUnfitError(
            f"{path} cannot be created: {error.strerror}", hint="choose another place, or let this user write there"
        ) from error
    try:
        yield path
    finally:
        for each in created:
            with suppress(OSError):  # somebody else uses it by now
                each.rmdir()
