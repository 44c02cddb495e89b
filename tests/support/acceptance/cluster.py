"""A standalone Spark cluster on this machine: one master and two workers of one core, each a process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyspark

from penstock.spark.java import ensure_java
from tests.support.waiting import wait_for

START_SECONDS = 180.0
_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"
_EXECUTOR = "CoarseGrainedExecutorBackend"
_ADDRESS = re.compile(r"Starting Spark master at (spark://\S+)")
_HOME = Path(pyspark.__file__).parent
_SOURCES = Path(__file__).parents[3] / "src"
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC"


class Cluster:
    """Starts on creation, with all files below `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        ensure_java()
        self._start(_MASTER, "master")
        wait_for(
            lambda: _ADDRESS.search(self._log("master")),
            "a master",
            lambda: self._log("master"),
            START_SECONDS,
        )
        found = _ADDRESS.search(self._log("master"))
        assert found is not None
        self.master = found[1]
        for name in ("worker1", "worker2"):
            work = ["--cores", "1", "--memory", "1g", "--work-dir", str(directory / name), self.master]
            self._start(_WORKER, name, *work)
        wait_for(
            lambda: self._log("master").count("Registering worker") == 2,
            "two workers",
            lambda: self._log("master"),
            START_SECONDS,
        )

    @property
    def conf(self) -> dict[str, str]:
        """Settings for a pipeline on the cluster: little memory, and event logs."""
        events = self._directory / "events"
        events.mkdir(exist_ok=True)
        return {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": QUICK_JAVA,
            # Where the package is not installed on the workers' machines; here it is the source tree.
            "spark.executorEnv.PYTHONPATH": str(_SOURCES),
            "spark.sql.shuffle.partitions": "2",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": events.as_uri(),
            "spark.eventLog.compress": "false",
            "spark.eventLog.rolling.enabled": "false",
        }

    def events(self) -> list[dict[str, Any]]:
        """The events that Spark logged for the one application that ran."""
        (log,) = (self._directory / "events").iterdir()
        return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]

    def executor_processes(self) -> Iterator[psutil.Process]:
        """Every process of the executors: their JVMs, and the Python workers of their tasks."""
        for worker in self._processes[1:]:
            with suppress(psutil.Error):
                for child in psutil.Process(worker.pid).children(recursive=True):
                    with suppress(psutil.Error):
                        if any(_EXECUTOR in each for each in child.cmdline()):
                            yield child
                            yield from child.children(recursive=True)

    def close(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            process.wait(timeout=60)

    def _start(self, main: str, name: str, *arguments: str) -> None:
        command = [
            str(_HOME / "bin" / "spark-class"),
            main,
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--webui-port",
            "0",
            *arguments,
        ]
        with (self._directory / f"{name}.log").open("wb") as output:
            self._processes.append(
                subprocess.Popen(command, env=self.environment, stdout=output, stderr=output)
            )

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "SPARK_HOME": str(_HOME),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(_SOURCES),
            "SPARK_DAEMON_MEMORY": "128m",
            "SPARK_DAEMON_JAVA_OPTS": QUICK_JAVA,
        }

    @property
    def submit(self) -> list[str]:
        """spark-submit, with little memory for the driver."""
        settings = {"spark.driver.memory": "512m", "spark.driver.extraJavaOptions": QUICK_JAVA}
        return [
            str(_HOME / "bin" / "spark-submit"),
            *(word for pair in settings.items() for word in ("--conf", "=".join(pair))),
        ]

    def _log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text(encoding="utf-8")


class Readers:
    """The client ports of all connections to the server, by kind of process."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self.ports: dict[str, set[int]] = {}

    def look(self, kind: str, processes: Iterable[psutil.Process]) -> None:
        found = self.ports.setdefault(kind, set())
        for process in processes:
            with suppress(psutil.Error):
                connections = process.net_connections(kind="tcp")
                found |= {
                    each.laddr.port
                    for each in connections
                    if each.raddr and each.raddr.port == self._server_port
                }


def processes_of(pid: int) -> list[psutil.Process]:
    """A process, and all that it has started."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def driver_process(pid: int) -> psutil.Process:
    """The Python program that spark-submit runs."""
    for process in processes_of(pid):
        with suppress(psutil.Error):
            if process.name() != "java" and any(word.endswith("run.py") for word in process.cmdline()):
                return process
    raise AssertionError("spark-submit runs no run.py")


def task_executors(events: list[dict[str, Any]], work: str) -> dict[str, int]:
    """For each executor, the number of tasks of this kind that it ran."""
    stages = {
        event["Stage Info"]["Stage ID"]
        for event in events
        if event["Event"] == "SparkListenerStageSubmitted"
        and any(each["Name"] == work for each in event["Stage Info"]["RDD Info"])
    }
    ended = (
        event for event in events if event["Event"] == "SparkListenerTaskEnd" and event["Stage ID"] in stages
    )
    return Counter(event["Task Info"]["Executor ID"] for event in ended)
