"""`IcebergSink` in JDBC and REST catalogs that are configured in one Spark session only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from pyspark.sql import SparkSession
from typing_extensions import override

from penstock.errors import SinkError
from penstock.position import Position
from penstock.sinks.base import TableChanges
from penstock.sinks.iceberg.catalog import IcebergCatalog
from tests.support.contract.iceberg_harness import IcebergHarness
from tests.support.contract.sink_harness import ITEMS
from tests.support.contract.sink_rules import MirrorRules
from tests.support.fix_catalog import Described, Kind, RestCatalogs
from tests.support.sinks.source import Value

pytestmark = pytest.mark.spark
OfKind = Callable[[Kind], Described]
KINDS: tuple[Kind, ...] = ("jdbc", "rest")


class CatalogHarness(IcebergHarness):
    def __init__(self, root: Path, spark: SparkSession, described: Described) -> None:
        self._described = described
        super().__init__(root, spark)

    @override
    def describe(self, name: str, warehouse: Path) -> None:
        self.spark.conf.set(f"spark.sql.catalog.{name}", "org.apache.iceberg.spark.SparkCatalog")
        for key, value in self._described(name, warehouse).items():
            self.spark.conf.set(f"spark.sql.catalog.{name}.{key}", value)

    @property
    def name(self) -> str:
        return f"{self.place.catalog}.public.items"

    def others(self, monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
        """Run `action` once, between the preparation of a commit and the commit to the catalog: the worst
        moment.
        """
        put = IcebergCatalog._put

        def slow(catalog: IcebergCatalog, *given: Any) -> None:
            monkeypatch.undo()
            action()
            put(catalog, *given)

        monkeypatch.setattr(IcebergCatalog, "_put", slow)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@pytest.fixture
def harness(spark: SparkSession, tmp_path: Path, described: OfKind, kind: Kind) -> CatalogHarness:
    return CatalogHarness(tmp_path, spark, described(kind))


class TestRules(MirrorRules):
    pass


def test_K01_to_K05_epochs_into_a_catalog_of_others(harness: CatalogHarness) -> None:
    """Values that only the target has are read by a second session, which must know the same catalog."""
    harness.copy()
    source = harness.source
    begun = harness.target()
    source.update(harness.at(1), {"size": Value("7")}, ["note"])
    source.delete(harness.at(2))
    end = harness.follow()
    assert harness.rows() == source.sorted_rows()
    harness.apply(harness.fence, end, begun)
    source.update(harness.at(3), {"size": Value("7")}, ["note"])
    harness.follow()
    assert harness.rows() == source.sorted_rows()


def test_K09_of_two_runs_that_commit_at_once_one_is_refused(
    harness: CatalogHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.copy()
    target = harness.target()
    harness.source.insert(harness.item(20))
    end = harness.commit()
    changes: TableChanges = harness.changes(harness.fence, end)
    other = harness.open()
    harness.others(monkeypatch, lambda: other.apply(target, changes, end))
    with pytest.raises(SinkError, match="another writer"):
        harness.sink.apply(target, changes, end)
    harness.sink.apply(target, changes, end)
    assert harness.rows() == harness.source.sorted_rows()
    assert harness.target().applied == end == Position.of(harness.source.position)


def test_K09_a_table_that_is_rolled_back_under_an_epoch_does_not_get_it(
    harness: CatalogHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.copy()
    version = harness.sink.version_at(ITEMS, harness.fence)
    harness.source.insert(harness.item(20))
    harness.follow()
    target = harness.target()
    harness.source.insert(harness.item(21))
    end = harness.commit()
    assert target.applied is not None
    changes, catalog = harness.changes(target.applied, end), harness.place.catalog
    harness.others(
        monkeypatch,
        lambda: _call(harness.spark, f"{catalog}.system.rollback_to_snapshot('public.items', {version})"),
    )
    with pytest.raises(SinkError, match="another writer"):
        harness.sink.apply(target, changes, end)
    harness.sink = harness.open()
    assert harness.target().applied == harness.fence
    harness.apply(harness.fence, end)
    assert (harness.rows(), harness.target().applied) == (harness.source.sorted_rows(), end)


def test_K09_table_properties_set_by_others_during_an_epoch_stay_and_rows_are_written_once(
    harness: CatalogHarness, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """A JDBC catalog compares the whole metadata, so the epoch starts again; a REST catalog compares the
    snapshot only.
    """
    harness.copy()
    target = harness.target()
    harness.source.insert(harness.item(20))
    harness.source.update(harness.at(1), {"note": Value("changed")})
    end = harness.commit()
    changes = harness.changes(harness.fence, end)
    alter = f"ALTER TABLE {harness.name} SET TBLPROPERTIES ('said' = 'by others')"
    harness.others(monkeypatch, lambda: _done(harness.spark, alter))
    if kind == "jdbc":
        with pytest.raises(SinkError, match="another writer"):
            harness.sink.apply(target, changes, end)
    harness.sink.apply(target, changes, end)
    assert (harness.rows(), harness.target().applied) == (harness.source.sorted_rows(), end)
    said = harness.spark.sql(f"SHOW TBLPROPERTIES {harness.name} ('said')").collect()
    assert [row["value"] for row in said] == ["by others"]


def _call(spark: SparkSession, procedure: str) -> None:
    _done(spark, f"CALL {procedure}")


def _done(spark: SparkSession, statement: str) -> None:
    spark.sql(statement).collect()


class LosingServer(ThreadingHTTPServer):
    """A proxy in front of a catalog.

    With `loses`, it passes the next commit of rows on, and then answers with a timeout.
    """

    daemon_threads = True

    def __init__(self, behind: str) -> None:
        self.behind, self.loses, self.commits = behind, False, 0
        super().__init__(("127.0.0.1", 0), _Losing)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Losing(BaseHTTPRequestHandler):
    server: LosingServer

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        wanted = {
            name: value for name, value in self.headers.items() if name.lower() in ("content-type", "accept")
        }
        request = Request(f"{self.server.behind}{self.path}", body or None, wanted, method=self.command)
        try:
            with urlopen(request, timeout=30) as answer:
                status, text = answer.status, answer.read()
        except HTTPError as error:
            with error:
                status, text = error.code, error.read()
        is_commit = b'"add-snapshot"' in body
        self.server.commits += is_commit
        is_lost, self.server.loses = is_commit and self.server.loses, self.server.loses and not is_commit
        self.send_response(503 if is_lost else status)
        if is_lost:
            self.send_header("Retry-After", "1")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(0 if is_lost or self.command == "HEAD" else len(text)))
        self.end_headers()
        if not is_lost and self.command != "HEAD":
            self.wfile.write(text)

    do_GET = do_POST = do_HEAD = do_DELETE = handle_any

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Silences the access log."""


@contextmanager
def losing(behind: str) -> Iterator[LosingServer]:
    with LosingServer(behind) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_K01_a_commit_whose_answer_was_lost_and_whose_repetition_is_refused_counts_as_done(
    spark: SparkSession, tmp_path: Path, rest_catalogs: RestCatalogs
) -> None:
    """Iceberg's client retries after such an answer. Its files must not be taken for those of a failed
    commit.
    """
    with losing("") as front:

        def describe(name: str, warehouse: Path) -> dict[str, str]:
            front.behind = rest_catalogs.serve(name, warehouse)
            return {"type": "rest", "uri": front.url, "warehouse": str(warehouse)}

        harness = CatalogHarness(tmp_path, spark, describe)
        harness.copy()
        harness.source.insert(harness.item(20))
        harness.source.delete(harness.at(1))
        front.commits, front.loses = 0, True
        end = harness.follow()
        assert front.commits == 2
        assert (harness.rows(), harness.target().applied) == (harness.source.sorted_rows(), end)
