"""One Spark session for the whole run; it takes seconds to start and hundreds of megabytes of memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POSTGRES_DRIVER = "org.postgresql:postgresql:42.7.8"
"""The JDBC driver, for Iceberg catalogs in a database."""


_FOR_WORKERS = Path(__file__).parent / "workers"
"""A directory for the PYTHONPATH of Spark's Python workers, see `sitecustomize.py` there."""
_READER_SERVER = "PENSTOCK_TEST_READER_SERVER"
"""The environment variable with the address of the server that forks stream readers."""


def pytest_configure() -> None:
    """Sessions and `penstock run` in separate processes inherit the environment, and pass it on to their
    workers.
    """
    given = os.environ.get("PYTHONPATH", "")
    if str(_FOR_WORKERS) not in given.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_FOR_WORKERS), given)))
    # numpy's linear algebra starts its threads at import, in every one of some thousand processes.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@contextmanager
def _reader_server() -> Iterator[str]:
    """Run the server that forks stream readers, for JVMs with its address in their environment. Other JVMs of
    the tests start their stream readers as the product does.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-readers-") as directory:
        address = f"{directory}/socket"
        command = [sys.executable, str(_FOR_WORKERS / "reader_server.py"), address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield address  # the end of the block closes the server's standard input, which ends it


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A local session with Delta and Iceberg, as the product builds it; small, since the data of tests is."""
    from penstock.errors import EnvironmentUnfitError
    from penstock.spark.java import delta_package, iceberg_package
    from penstock.spark.session import SHORT_LIVED, build_session

    packages = [POSTGRES_DRIVER]
    for package in (delta_package, iceberg_package):
        with suppress(
            EnvironmentUnfitError
        ):  # not published for this Spark; the tests of the source do not need it
            packages.append(package())

    with _reader_server() as address:
        os.environ[_READER_SERVER] = address
        session = build_session(
            "penstock-tests",
            master="local[2]",
            packages=packages,
            conf={
                **SHORT_LIVED,
                # a session caches every catalog and table that it has loaded, those of other tests included
                "spark.driver.memory": "4g",
                "spark.sql.shuffle.partitions": "2",
                "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
            },
        )
        del os.environ[_READER_SERVER]
        gateway = session.sparkContext._gateway
        assert gateway is not None
        yield session
        session.stop()
        # stop() leaves the JVM and the pipe to it open; the JVM ends when its standard input does.
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(timeout=60)
