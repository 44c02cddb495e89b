"""Holds a snapshot open for a batch read, in a process of its own.

Whoever plans the query starts it and reads the snapshot's name from it; tasks import the snapshot while they read. It ends by itself: when
no task has been reading for some time, when the longest time is over, when Spark's process is gone, or when the connection is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from penstock.errors import PenstockError, SnapshotLostError, parse_error
from penstock.postgres.connection import SourceAddress, connect
from penstock.postgres.exported import count_readers, share_snapshot
from penstock.secret import Secret

IDLE_SECONDS = 300.0
"""How long nobody needs to read before the snapshot is let go: a query may do other things first, or be run again."""

_LOOK_SECONDS = 1.0


def hold_snapshot(address: SourceAddress, longest_seconds: float, idle_seconds: float = IDLE_SECONDS) -> str:
    """Start a holder and give the name of its snapshot."""
    errand = {
        "dsn": address.dsn,
        "password": address.password.reveal() if address.password is not None else None,
        "longest_seconds": longest_seconds,
        "idle_seconds": idle_seconds,
        "keeper": os.getppid(),
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # By its standard input: arguments and environments can be seen by others.
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.spark.holder"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        process.stdin.write(json.dumps(errand).encode())
        process.stdin.close()
        answer = process.stdout.readline().decode().strip().replace("\\n", "\n")
    process.wait()
    if not answer or answer.startswith("PEN-"):
        raise parse_error(answer) or SnapshotLostError("the process that holds the snapshot ended at once")
    return answer


def main() -> None:
    errand = json.loads(sys.stdin.read())
    if os.fork():
        os._exit(0)  # whoever started it need not wait for what goes on
    password = errand["password"]
    address = SourceAddress(errand["dsn"], Secret(password) if password else None)
    try:
        with share_snapshot(address) as name:
            sys.stdout.write(name + "\n")
            sys.stdout.flush()
            sys.stdout.close()
            _wait(address, errand["longest_seconds"], errand["idle_seconds"], errand["keeper"])
    except PenstockError as error:
        if not sys.stdout.closed:
            sys.stdout.write(str(error).replace("\n", "\\n") + "\n")


def _wait(address: SourceAddress, longest_seconds: float, idle_seconds: float, keeper: int) -> None:
    started = used = time.monotonic()
    with connect(address, "penstock holder") as connection:
        while time.monotonic() - used < idle_seconds and time.monotonic() - started < longest_seconds and _is_alive(keeper):
            time.sleep(_LOOK_SECONDS)
            if count_readers(connection) > 0:
                used = time.monotonic()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    main()
