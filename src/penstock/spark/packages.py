"""The Maven packages that sinks need, for the Spark that is installed. Nothing of Spark is imported to know it."""

from __future__ import annotations

from importlib.metadata import version

from penstock.errors import EnvironmentUnfitError

DELTA_VERSION = "4.4.0"
_DELTA_MINORS = {"4.1", "4.2"}
ICEBERG_VERSION = "1.12.0"
_ICEBERG_MINORS = {"4.1"}


def spark_minor() -> str:
    """The running Spark's `major.minor`."""
    return ".".join(version("pyspark").split(".")[:2])


def delta_package() -> str:
    """The Maven coordinate of Delta for the running Spark."""
    minor = spark_minor()
    if minor not in _DELTA_MINORS:
        raise EnvironmentUnfitError(
            f"there is no release of Delta Lake for Spark {minor} yet",
            hint="install pyspark 4.1 or 4.2, or name a package of your own under spark.packages",
        )
    return f"io.delta:delta-spark_{minor}_2.13:{DELTA_VERSION}"


def iceberg_package() -> str:
    """The Maven coordinate of Iceberg for the running Spark."""
    minor = spark_minor()
    if minor not in _ICEBERG_MINORS:
        raise EnvironmentUnfitError(
            f"there is no release of Iceberg for Spark {minor} yet",
            hint="install pyspark 4.1, or name a package of your own under spark.packages",
        )
    return f"org.apache.iceberg:iceberg-spark-runtime-{minor}_2.13:{ICEBERG_VERSION}"
