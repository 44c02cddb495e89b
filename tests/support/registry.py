"""A schema registry for the tests: Apicurio, which implements Confluent's API, with its schemas in memory.

The Maven artifact is fetched once for each user, checked against its digest, unpacked next to its place in
the cache and renamed into it. The registry is a child of this process, on a free port of the loopback
address. If this process is killed, a small guard process notices that its standard input closed, and ends the
registry.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import tarfile
import tempfile
import time
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from penstock.errors import EnvironmentUnfitError
from penstock.spark.java import find_java, user_cache_dir
from penstock.testing import downloads as maven

_COORDINATES = maven.Coordinates("io.apicurio", "apicurio-registry-app", "2.6.13.Final", "tar.gz", "all")
_SHA256 = "3cda1b34aa020fb4ac4dd6a66018d757e81e437f97e20a1f92d366b70091c6ba"
_HINT = "see to it that Spark can fetch packages on this machine"
_HOST = "127.0.0.1"
_API = "apis/ccompat/v7"
_GUARD = 'read -r _; kill "$1"'
_PORTS = range(20_000, 32_000)
_START_SECONDS = 240.0
_STOP_SECONDS = 30.0


def ensure_registry() -> Path:
    """The directory of the registry's program, fetched on first use."""
    home = user_cache_dir() / "registry" / _COORDINATES.revision
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{_COORDINATES.revision}-", dir=home.parent) as scratch:
            archive = maven.fetch(_COORDINATES, Path(scratch), _HINT)
            maven.check_released(archive, _SHA256, str(_COORDINATES))
            draft = Path(scratch) / "registry"
            with tarfile.open(archive, "r:gz") as files:
                files.extractall(draft, filter="data")
            try:
                draft.rename(home)
            except OSError:
                if not home.exists():
                    raise
    return home


class EmbeddedRegistry:
    """Runs between `__enter__` and `__exit__`; `url` is the address of Confluent's API."""

    def __init__(self) -> None:
        self._port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._scratch = tempfile.TemporaryDirectory(prefix="penstock-registry-")

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self._port}/{_API}"

    def set_compatibility(self, subject: str, level: str) -> None:
        """The compatibility rule of a subject's schemas, such as BACKWARD; by default none."""
        body = json.dumps({"compatibility": level}).encode()
        request = Request(
            f"{self.url}/config/{subject}", body, {"Content-Type": "application/json"}, method="PUT"
        )
        with urlopen(request, timeout=30):
            pass

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self) -> None:
        (program,) = ensure_registry().glob("*-runner.jar")
        java = [str(find_java()), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]
        settings = [f"-Dquarkus.http.host={_HOST}", f"-Dquarkus.http.port={self._port}"]
        log = Path(self._scratch.name) / "registry.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*java, *settings, "-jar", str(program)],
                cwd=self._scratch.name,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", str(self._process.pid)], stdin=subprocess.PIPE
        )
        self._await_answer(log)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.kill()
            self._guard.stdin.close()
            self._guard.wait()
        self._scratch.cleanup()

    def _await_answer(self, log: Path) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                with urlopen(f"{self.url}/subjects", timeout=5) as answer:
                    answer.read()
                return
            except (OSError, HTTPException) as error:
                if isinstance(error, HTTPError):
                    error.close()
                assert self._process is not None
                if self._process.poll() is not None or time.monotonic() > deadline:
                    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
                    raise EnvironmentUnfitError(
                        f"the schema registry does not start: {' | '.join(tail)}", hint="see its log"
                    ) from error
                time.sleep(0.1)


def _free_port() -> int:
    """Below the ephemeral range, so that no other process is given the port before the registry, seconds
    later, listens.
    """
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((_HOST, port))
            return port
    raise EnvironmentUnfitError(
        "no port is free for the schema registry", hint=f"see who listens on ports {_PORTS.start} and higher"
    )
