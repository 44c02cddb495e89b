"""Process that holds a snapshot open for a batch read.

The process that plans the query starts the holder and reads the snapshot's name from its output. Tasks import
the snapshot. The holder exits when no task has read for `idle_seconds`, when the maximum time has passed, or
when Spark's process or the database connection is gone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from penstock.errors import PenstockError, SnapshotLostError, parse_error
from penstock.postgres.connection import SourceAddress
from penstock.postgres.snapshot_export import SharedSnapshot, share_snapshot
from penstock.secret import Secret

IDLE_SECONDS = 60.0
"""Time without a reading task after which the snapshot is released."""
PATIENCE = 5
"""How long to wait for the first reader, as a multiple of the idle time, since Spark may be busy."""

_LOOK_SECONDS = 1.0


def hold_snapshot(address: SourceAddress, longest_seconds: float, idle_seconds: float = IDLE_SECONDS) -> str:
    """Start a holder and return the name of its snapshot."""
    request = {
        "dsn": address.dsn,
        "password": address.password.reveal() if address.password is not None else None,
        "longest_seconds": longest_seconds,
        "idle_seconds": idle_seconds,
        "keeper": os.getppid(),
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # The request is passed on standard input, because other users can see a process's arguments.
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
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
        answer = process.stdout.readline().decode().strip().replace("\\n", "\n")
    process.wait()
    if not answer or answer.startswith("PEN-"):
        raise parse_error(answer) or SnapshotLostError(
            "the process that should hold the snapshot exited immediately"
        )
    return answer


def main() -> None:
    request = json.loads(sys.stdin.read())
    if os.fork():
        os._exit(0)  # the planning process waits only for the parent, not for the child
    password = request["password"]
    address = SourceAddress(request["dsn"], Secret(password) if password else None)
    try:
        with share_snapshot(address) as shared:
            sys.stdout.write(shared.name + "\n")
            sys.stdout.flush()
            sys.stdout.close()
            _wait(shared, request["longest_seconds"], request["idle_seconds"], request["keeper"])
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
