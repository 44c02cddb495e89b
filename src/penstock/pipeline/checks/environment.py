"""Check this machine: state directory, separate capture, target location, Spark, Java, TLS."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock import storage
from penstock.capture.factory import check_shared, missing_capture
from penstock.config.model import PipelineConfig
from penstock.config.sink import PostgresConfig
from penstock.errors import EnvironmentUnfitError
from penstock.pipeline.checks.findings import Step
from penstock.postgres.connection import Connection, connect, tls_weakness
from penstock.postgres.target.ddl import probe_target
from penstock.sinks.base import DEAD_LETTERS, SCRATCH, SNAPSHOTS

_LEAST_FREE_BYTES = 256 << 20


def check_places(config: PipelineConfig) -> list[Step]:
    capture = [_check_capture(config)] if config.source.process == "separate" else []
    return [_check_state(config), *capture, _check_sink(config), _check_spark(config), _check_java()]


def _check_state(config: PipelineConfig) -> Step:
    step = Step("state directory", str(config.state))
    _warn_of_readers(step, config)
    with step.catching(), temporary_place(config.spool) as place:
        _write_durably(place)
        free = storage.free_bytes(place)
        step.detail = f"{config.state}, {free >> 20:,} MiB free"
        if free < _LEAST_FREE_BYTES:
            raise EnvironmentUnfitError(
                f"the disk of {config.state} has only {free >> 20} MiB left",
                hint="free space on it, or set state: to a directory on another disk",
            )
        if free < config.max_spool_bytes:
            fix = "free space, lower max_spool_bytes:, or set state: to a directory on another disk"
            step.warn(
                "spool-larger-than-disk",
                f"the spool may grow to {config.max_spool_bytes >> 20:,} MiB, "
                "more than the free space of its disk",
                fix,
            )
    return step


def _warn_of_readers(step: Step, config: PipelineConfig) -> None:
    """Warn of directories that contain source rows and that other users may read. Such directories were
    created by hand, or by an older version.
    """
    own = [config.sink.root / each / config.pipeline for each in (DEAD_LETTERS, SNAPSHOTS, SCRATCH)]
    for place in dict.fromkeys([config.state, config.spool, *own]):
        if storage.is_open_to_others(place):
            what = f"{place} holds rows of the source, and other users of this machine may read it"
            step.warn("readable-by-others", what, f"chmod -R go-rwx {shlex.quote(str(place))}")


def _check_capture(config: PipelineConfig) -> Step:
    """Check the separate capture. If it does not run, warn, because a run would wait for it."""
    step = Step("capture", f"into {config.spool}")
    with step.catching():
        missing = missing_capture(config.spool)
        if missing is not None:
            step.warn("capture-not-running", missing.message, missing.hint)
        check_shared(config.spool, config.slot, config.origin, config.type_policy)
    return step


def _check_sink(config: PipelineConfig) -> Step:
    """Write a small table as a snapshot does, without Spark."""
    root = config.sink.root
    if config.sink.postgres is not None:
        return _check_postgres(config.sink.postgres)
    step = Step("target", str(root))
    with step.catching(), temporary_place(root, shared=True) as place:
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
            storage.delete_tree(probe)
    return step


def _check_postgres(config: PostgresConfig) -> Step:
    """Create a table in the target schema, in a transaction that is rolled back, and write a file to the
    directory of epoch records.
    """
    step = Step("target", "Postgres")
    with step.catching():
        address = config.address()
        step.detail = address.describe()
        with connect(address, "penstock check") as connection:
            warn_of_tls(step, connection, "sink.postgres.dsn")
        probe_target(address)
        with temporary_place(config.state) as place:
            _write_durably(place)
    return step


def warn_of_tls(step: Step, connection: Connection, key: str) -> None:
    weakness = tls_weakness(connection)
    if weakness is not None:
        fix = (
            f"sslmode=verify-full in {key}, with sslrootcert=system or the file of the certificate authority"
        )
        step.warn("tls-not-verified", weakness, fix)


def _check_spark(config: PipelineConfig) -> Step:
    """Check whether the sink has a package for this Spark version. Packages named in the configuration are
    accepted.
    """
    step = Step("spark")
    with step.catching():
        from penstock.pipeline.sink_factory import sink_packages
        from penstock.spark.java import spark_minor

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
        storage.put(probe, b"check")
        storage.delete(probe)
    except OSError as error:
        hint = "choose another directory, or give this user write permission"
        raise EnvironmentUnfitError(f"{place} cannot be written to: {error.strerror}", hint=hint) from error


def _write_table(path: Path) -> None:
    try:
        import pyarrow as pa
        from deltalake import DeltaTable, write_deltalake
        from deltalake.exceptions import DeltaError
    except ImportError as error:
        raise EnvironmentUnfitError(
            "the package deltalake is not installed", hint="pip install 'penstock[delta]'"
        ) from error
    try:
        write_deltalake(str(path), pa.table({"id": pa.array([1], pa.int64())}))
        DeltaTable(str(path)).version()
    except (DeltaError, OSError) as error:
        reason = " ".join(str(error).split())
        raise EnvironmentUnfitError(
            f"no Delta table can be written under {path.parent}: {reason}", hint="change sink.delta.path"
        ) from error


@contextmanager
def temporary_place(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Context manager that creates the directory `path`. At its end it removes the directories that it
    created.
    """
    try:
        created = [each for each in (path, *path.parents) if not storage.exists(each)]
        storage.ensure_directory(path, shared=shared)
    except OSError as error:
        raise EnvironmentUnfitError(
            f"{path} cannot be created: {error.strerror}",
            hint="choose another directory, or give this user write permission",
        ) from error
    try:
        yield path
    finally:
        for each in created:
            with suppress(OSError):  # another process uses the directory now
                storage.delete_empty_directory(each)
