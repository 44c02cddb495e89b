"""One Spark session for the whole run; it takes seconds to start and hundreds of megabytes of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POSTGRES_DRIVER = "org.postgresql:postgresql:42.7.8"
"""The JDBC driver, for Iceberg catalogs in a database."""


_FOR_WORKERS = Path(__file__).parent / "workers"
"""A directory for the PYTHONPATH of Spark's Python workers, see `sitecustomize.py` there."""


def pytest_configure() -> None:
    """Sessions and `penstock run` in separate processes inherit the environment, and pass it on to their
    workers.
    """
    given = os.environ.get("PYTHONPATH", "")
    if str(_FOR_WORKERS) not in given.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_FOR_WORKERS), given)))
    # numpy's linear algebra starts its threads at import, in every one of some thousand processes.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


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
    gateway = session.sparkContext._gateway
    assert gateway is not None
    yield session
    session.stop()
    # stop() leaves the JVM and the pipe to it open; the JVM ends when its standard input does.
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=60)
