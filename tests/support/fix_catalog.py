"""REST catalogs for Iceberg, served by Iceberg's reference implementation, and the Spark settings of every
kind of catalog.

The servlet is published among Iceberg's test classes. It runs in one JVM for the whole run, which this
process controls and ends; every catalog has its own port on the loopback address. The catalogs store their
data in a database.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psycopg.conninfo
import pyspark
import pytest

from penstock.spark.java import find_java, user_cache_dir
from penstock.testing import downloads as maven
from tests.support.fix_postgres import PostgresServer

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway

_ICEBERG, _JETTY, _DRIVER = "1.11.0", "12.1.8", "42.7.8"
_PROGRAM = (
    maven.Coordinates("org.apache.iceberg", "iceberg-core", _ICEBERG),
    maven.Coordinates("org.apache.iceberg", "iceberg-core", _ICEBERG, classifier="tests"),
    maven.Coordinates("org.eclipse.jetty.ee10", "jetty-ee10-servlet", _JETTY),
    maven.Coordinates("org.postgresql", "postgresql", _DRIVER),
)
"""The servlet of 1.12 is not published. The API used here is the same."""
_SHA256 = "9a461ef8412ca81cf8aed12be6363da9d7823c089014b9078cb006028ba6eade"
_HOST = "127.0.0.1"
_HINT = "see to it that Spark can fetch packages on this machine"

Kind = Literal["jdbc", "rest"]
Described = Callable[[str, Path], dict[str, str]]
"""A function of the catalog's name and warehouse that returns Spark's settings, without the prefix."""


def ensure_program() -> Path:
    """The directory of the server's jars, fetched on first use."""
    home = user_cache_dir() / "iceberg-rest" / f"{_ICEBERG}-{_JETTY}"
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{home.name}-", dir=home.parent) as scratch:
            jars = maven.fetch_program(_PROGRAM, Path(scratch), _HINT)
            maven.check_released(jars, _SHA256, "Iceberg's REST catalog")
            try:
                jars.rename(home)
            except OSError:
                if not home.exists():
                    raise
    return home


class RestCatalogs:
    """A context manager. Each call creates another catalog and returns its address."""

    def __init__(self, dsn: str) -> None:
        self._jdbc = jdbc_settings(dsn)
        self._gateway: JavaGateway | None = None

    def __enter__(self) -> RestCatalogs:
        from py4j.java_gateway import JavaGateway

        spark = Path(pyspark.__file__).parent / "jars"
        jars = [*ensure_program().glob("*.jar"), *spark.glob("hadoop-client-*.jar")]
        (py4j,) = spark.glob("py4j-*.jar")
        self._gateway = JavaGateway.launch_gateway(
            jarpath=str(py4j),
            classpath=":".join(map(str, jars)),
            javaopts=["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"],
            java_path=str(find_java()),
            die_on_exit=True,
            enable_auth=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._gateway is not None:
            process = self._gateway.java_process
            self._gateway.shutdown()
            process.stdin.close()  # the JVM waits for it
            process.wait(timeout=60)

    def serve(self, name: str, warehouse: Path) -> str:
        assert self._gateway is not None
        jvm: Any = self._gateway.jvm
        settings = jvm.java.util.HashMap()
        for key, value in {**self._jdbc, "warehouse": str(warehouse)}.items():
            settings.put(key, value)
        backend = jvm.org.apache.iceberg.jdbc.JdbcCatalog()
        backend.setConf(jvm.org.apache.hadoop.conf.Configuration())
        backend.initialize(name, settings)
        jetty = jvm.org.eclipse.jetty
        servlet = jvm.org.apache.iceberg.rest.RESTCatalogServlet(
            jvm.org.apache.iceberg.rest.RESTCatalogAdapter(backend)
        )
        server = jetty.server.Server(jvm.java.net.InetSocketAddress(_HOST, 0))
        context = jetty.ee10.servlet.ServletContextHandler()
        context.addServlet(jetty.ee10.servlet.ServletHolder(servlet), "/*")
        server.setHandler(context)
        server.start()
        return f"http://{_HOST}:{server.getURI().getPort()}"


def jdbc_settings(dsn: str) -> dict[str, str]:
    """The settings of a catalog in that database."""
    given = psycopg.conninfo.conninfo_to_dict(dsn)
    settings = {
        "uri": f"jdbc:postgresql://{given['host']}:{given['port']}/{given['dbname']}",
        "jdbc.user": str(given["user"]),
    }
    password = {"jdbc.password": str(given["password"])} if given.get("password") else {}
    return {**settings, **password, "jdbc.schema-version": "V1"}


@pytest.fixture(scope="session")
def catalog_dsn(postgres_server: PostgresServer) -> Iterator[str]:
    """Settings for catalogs in one database, in which each catalog has separate rows."""
    created = postgres_server.create_database()
    yield created.dsn
    created.close()
    postgres_server.drop_database(created.name)


@pytest.fixture(scope="session")
def rest_catalogs(catalog_dsn: str) -> Iterator[RestCatalogs]:
    with RestCatalogs(catalog_dsn) as running:
        yield running


@pytest.fixture
def described(request: pytest.FixtureRequest) -> Callable[[Kind], Described]:
    def of_kind(kind: Kind) -> Described:
        def describe(name: str, warehouse: Path) -> dict[str, str]:
            if kind == "jdbc":
                own = {"type": "jdbc", **jdbc_settings(request.getfixturevalue("catalog_dsn"))}
            else:
                own = {"type": "rest", "uri": request.getfixturevalue("rest_catalogs").serve(name, warehouse)}
            return {**own, "warehouse": str(warehouse)}

        return describe

    return of_kind
