"""Downloads of Spark packages by several processes of one user."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pyspark import SparkContext

from penstock.spark.session import one_download_at_a_time
from penstock.storage.locks import is_exclusive_held
from penstock.testing.streams import Background

PACKAGE = "io.delta:delta-spark_4.1_2.13:4.4.0"
JAR = "io.delta_delta-spark_4.1_2.13-4.4.0.jar"


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock file of downloads, for a process that has not started its JVM."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.setattr(SparkContext, "_gateway", None)
    return tmp_path / "cache" / "penstock" / "spark-packages.lock"


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "ivy" / "jars").mkdir(parents=True)
    return {"spark.jars.packages": PACKAGE, "spark.jars.ivy": str(tmp_path / "ivy")}


def download(settings: dict[str, str]) -> None:
    Path(settings["spark.jars.ivy"], "jars", JAR).touch()


def test_a_process_that_downloads_packages_excludes_others(lock: Path, settings: dict[str, str]) -> None:
    with one_download_at_a_time(settings):
        assert is_exclusive_held(lock)
    assert not is_exclusive_held(lock)


def test_processes_with_all_packages_start_at_the_same_time(lock: Path, settings: dict[str, str]) -> None:
    download(settings)
    with one_download_at_a_time(settings):
        assert lock.exists()
        assert not is_exclusive_held(lock)


def test_a_process_waits_for_a_running_download(lock: Path, settings: dict[str, str]) -> None:
    events: list[str] = []
    entered = threading.Event()

    def start() -> None:
        entered.set()
        with one_download_at_a_time(settings):
            events.append("started")

    with one_download_at_a_time(settings):
        second = Background(start)
        assert entered.wait(10)
        download(settings)
        events.append("downloaded")
    second.result(10, "the second start")
    assert events == ["downloaded", "started"]


def test_sessions_without_packages_need_no_lock(lock: Path) -> None:
    with one_download_at_a_time({}):
        assert not lock.exists()
