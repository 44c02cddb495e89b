"""Processes of a snapshot killed repeatedly, under writes: it ends equal, and reads no finished chunk again.

PENSTOCK_TEST_KILLS sets how often; from 20 on the table has two million rows. `make test-kills` does that.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock.spark.session import SHORT_LIVED
from tests.support.fix_pipeline import Mirror, MirrorFactory
from tests.support.fix_postgres import Database

KILLS = int(os.environ.get("PENSTOCK_TEST_KILLS", "3"))
ROWS, CHUNK_BYTES = (2_000_000, 524_288) if KILLS >= 20 else (60_000, 65_536)
LIFE_SECONDS = 300.0
END_SECONDS = 60.0

_RUNNER = Path(__file__).parents[1] / "support" / "recovery" / "logged_run.py"
_EXPORTERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_replication WHERE application_name = 'penstock snapshot'"
)
_CAPTURES = (
    "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s AND active"
)


@pytest.mark.timeout(3600)
def test_N03_a_snapshot_survives_the_death_of_anybody_and_reads_no_finished_chunk_again(
    database: Database, mirror: MirrorFactory, tmp_path: Path
) -> None:
    seed = int(os.environ.get("PENSTOCK_TEST_KILL_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"PENSTOCK_TEST_KILL_SEED={seed}, {KILLS} kills")  # shown when the test fails
    choices = random.Random(seed)
    database.execute("CREATE TABLE victim (id int PRIMARY KEY, n int NOT NULL, v text)")
    database.execute(f"INSERT INTO victim SELECT g, g, md5(g::text) FROM generate_series(1, {ROWS}) g")
    victim = mirror(snapshot_chunk_bytes=CHUNK_BYTES, spark={"master": "local[2]", "conf": SHORT_LIVED})
    log = tmp_path / "log.jsonl"
    kinds = _shuffled(choices)
    with _writing(database, choices.randrange(1 << 30)) as writes:
        while kinds:
            _live(victim, database, log, kinds, choices)
    assert writes.is_set(), "no session wrote anything"
    assert "snapshot finished" not in [each["message"] for each in _lines(log)], (
        "the kills were too late to hit anything"
    )
    done = _penstock(victim, log, "--once", timeout=LIFE_SECONDS * 4)
    assert done.returncode == 0, done.stdout[-3000:]
    mirror().assert_equal(
        "public.victim"
    )  # the same pipeline; chunks for the comparison are as large as usual
    _assert_read_once(_lines(log))


def _live(victim: Mirror, database: Database, log: Path, kinds: list[str], choices: random.Random) -> None:
    """One run, until a kill ends it. Survived kills are recognised by further chunks.

    Without its reader a run continues to copy until Spark notices that the stream has ended.
    """
    with _started(victim, log) as process:
        while kinds:
            _await_chunks(log, process, choices.randrange(1, 4))
            kind, killed = kinds[-1], partial(KILLERS[kinds[-1]], process, database, victim)
            deadline = time.monotonic() + LIFE_SECONDS
            while not killed():
                if process.poll() is not None:
                    return  # of an earlier kill, which it noticed late
                assert time.monotonic() < deadline, f"there is no {kind} to kill:\n{_output(log)}"
                time.sleep(0.05)
            kinds.pop()
            if kind == "driver":
                _assert_ended_without_spark(process, log)
            if kind in ("driver", "session") or not _goes_on(process, log) or kind == "reader":
                return


def _assert_ended_without_spark(process: subprocess.Popen[bytes], log: Path) -> None:
    """A run whose JVM was killed does not retry: it ends with the cause, the remedy and the exit code of the
    environment.
    """
    try:
        code = process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the run goes on {END_SECONDS} s after its JVM was killed:\n{_output(log)}")
    printed = _output(log)
    assert code == 3, printed
    assert "PEN-1003: the Spark session has ended" in printed[-500:]


def _kill_driver(process: subprocess.Popen[bytes], *_: object) -> bool:
    (java,) = [pid for pid, command in _family(process) if "/java" in command][:1]
    os.kill(java, signal.SIGKILL)
    return True


def _kill_session(process: subprocess.Popen[bytes], *_: object) -> bool:
    os.killpg(process.pid, signal.SIGKILL)
    return True


def _kill_reader(process: subprocess.Popen[bytes], *_: object) -> bool:
    return _kill_one(process, "streaming")


def _kill_worker(process: subprocess.Popen[bytes], *_: object) -> bool:
    return _kill_one(process, "pyspark.daemon pyspark.worker")


def _kill_one(process: subprocess.Popen[bytes], sign: str) -> bool:
    """The youngest process: of a daemon and its workers, a worker."""
    found = sorted(pid for pid, command in _family(process) if sign in command)
    with suppress(ProcessLookupError):
        os.kill(found[-1], signal.SIGKILL)
    return bool(found)


def _end_exporter(_: object, database: Database, __: object) -> bool:
    database.query(_EXPORTERS)
    return True


def _end_capture(_: object, database: Database, victim: Mirror) -> bool:
    return bool(database.query(_CAPTURES, victim.slot))


KILLERS: dict[str, Callable[[subprocess.Popen[bytes], Database, Mirror], bool]] = {
    "driver": _kill_driver,
    "worker": _kill_worker,
    "exporter": _end_exporter,
    "capture": _end_capture,
    "reader": _kill_reader,
    "session": _kill_session,
}


def _shuffled(choices: random.Random) -> list[str]:
    """Each kind once, in random order."""
    kinds = [list(KILLERS)[number % len(KILLERS)] for number in range(KILLS)]
    choices.shuffle(kinds)
    return kinds


def _family(process: subprocess.Popen[bytes]) -> list[tuple[int, str]]:
    """The processes of the run's session: pid and command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ProcessLookupError):
            if os.getsid(int(path.name)) == process.pid:
                found.append((int(path.name), (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
    return found


@contextmanager
def _started(victim: Mirror, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(_RUNNER), str(log), "run", str(victim.path)]
    with log.with_suffix(".out").open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=60)


def _penstock(victim: Mirror, log: Path, *options: str, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_RUNNER), str(log), "run", str(victim.path), *options]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=timeout
    )


def _await_chunks(log: Path, process: subprocess.Popen[bytes], count: int) -> None:
    """Wait until this number of further chunks has been read."""
    wanted = len(_chunks(log)) + count
    _await(
        lambda: len(_chunks(log)) >= wanted or process.poll() is not None, "there are no further chunks", log
    )
    assert process.poll() is None, f"the run ended by itself:\n{_output(log)}"


def _goes_on(process: subprocess.Popen[bytes], log: Path) -> bool:
    """Whether the run survives: it reads a further chunk. If not, it must exit."""
    wanted = len(_chunks(log)) + 1
    _await(
        lambda: len(_chunks(log)) >= wanted or process.poll() is not None,
        "there are neither further chunks nor an end",
        log,
    )
    return process.poll() is None


def _await(condition: Callable[[], bool], otherwise: str, log: Path) -> None:
    deadline = time.monotonic() + LIFE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{otherwise}:\n{_output(log)}"
        time.sleep(0.05)


def _output(log: Path) -> str:
    return log.with_suffix(".out").read_text()[-3000:]


def _lines(log: Path) -> list[dict[str, Any]]:
    """The complete lines. A line that was cut off by SIGKILL is ignored."""
    found = []
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def _chunks(log: Path) -> list[dict[str, Any]]:
    return [each for each in _lines(log) if each["message"] == "chunk read"]


def _assert_read_once(lines: list[dict[str, Any]]) -> None:
    planned = [each for each in lines if each["message"] == "snapshot planned"]
    resumed = [each for each in lines if each["message"] == "snapshot resumed"]
    read = Counter((each["plan"], each["chunk"]) for each in lines if each["message"] == "chunk read")
    print(
        f"{planned[-1]['chunks']} chunks, taken up {len(resumed)} times, {len(planned)} plans, "
        f"{sum(read.values())} reads logged"
    )
    assert max(read.values()) == 1, "a finished chunk was read again"
    # A new plan is made only if nothing had been read under the previous one.
    assert {plan for plan, _ in read} == {planned[-1]["plan"]}
    done = [each["done"] for each in resumed]
    assert done == sorted(done)
    assert len(resumed) >= 2


@contextmanager
def _writing(database: Database, seed: int) -> Iterator[threading.Event]:
    """A thread that changes rows all over the table."""
    stopping, wrote = threading.Event(), threading.Event()

    def write() -> None:
        choices = random.Random(seed)
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            while not stopping.wait(0.1):
                first = choices.randrange(ROWS)
                connection.execute(
                    "UPDATE victim SET n = n + 1 WHERE id BETWEEN %s AND %s", [first, first + 10]
                )
                connection.execute("DELETE FROM victim WHERE id = %s", [choices.randrange(ROWS)])
                connection.execute("UPDATE victim SET id = -id WHERE id = %s", [choices.randrange(1, ROWS)])
                connection.execute(
                    "INSERT INTO victim VALUES (%s, 0, 'new') ON CONFLICT DO NOTHING",
                    [ROWS + choices.randrange(ROWS)],
                )
                wrote.set()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield wrote
    finally:
        stopping.set()
        thread.join(60)
