"""Holds a snapshot open for a batch read, in a process of its own.

Whoever plans the query starts it and reads the snapshot's name from it; tasks import the snapshot while they read. It ends by itself: when
tasks have come and gone, when none has come for long, when the longest time is over, when Spark's process or the connection is gone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from penstock.errors import PenstockError, SnapshotLostError, parse_error
from penstock.postgres.connection import SourceAddress
from penstock.postgres.exported import SharedSnapshot, share_snapshot
from penstock.secret import Secret

IDLE_SECONDS = 60.0
"""How long nobody reads, after somebody has, before the snapshot is let go."""
PATIENCE = 5
"""How many times as long it waits for the first reader: Spark may have other things to do."""

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
        with share_snapshot(address) as shared:
            sys.stdout.write(shared.name + "\n")
            sys.stdout.flush()
            sys.stdout.close()
            _wait(shared, errand["longest_seconds"], errand["idle_seconds"], errand["keeper"])
    except PenstockError as error:
        if not sys.stdout.closed:
            sys.stdout.write(str(error).replace("\n", "\\n") + "\n")


def _wait(shared: SharedSnapshot, longest_seconds: float, idle_seconds: float, keeper: int) -> None:
    now = time.monotonic()
    last, due = now + longest_seconds, now + idle_seconds * PATIENCE
    while time.monotonic() < min(last, due) and _is_alive(keeper):
        time.sleep(_LOOK_SECONDS)
        if shared.count_readers() > 0:
            due = time.monotonic() + idle_seconds


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
