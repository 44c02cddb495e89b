"""Fork server for the stream readers of the tests' shared Spark session.

`python reader_server.py SOCKET` imports what a stream reader needs, and forks for each connection. The fork
gets the environment and the standard streams of the process that Spark started, and runs pyspark's module.
That process stays, since Spark signals it and waits for it: it passes SIGTERM on, and its end ends the fork.
Its exit status is always 0.

Only the standard library is imported at the top: every stream reader's process imports this module.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading

_RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"
_MODULES = (_RUNNER, "pyspark_penstock", "penstock.spark.reader", "penstock.capture.factory")
_STREAMS = 3
_LONGEST_ENVIRONMENT = 1 << 20
_TERMINATE = b"T"


def run_forked(address: str) -> None:
    """Let the server at `address` run the stream reader of this process, and end with it.

    Returns if no server answers; the process then runs the stream reader itself.
    """
    connection = socket.socket(socket.AF_UNIX)
    environment = json.dumps(dict(os.environ)).encode()
    try:
        connection.connect(address)
        socket.send_fds(connection, [len(environment).to_bytes(4, "big")], range(_STREAMS))
        connection.sendall(environment)
    except OSError:
        connection.close()
        return
    signal.signal(signal.SIGTERM, lambda *_: connection.sendall(_TERMINATE))
    while connection.recv(1):
        pass
    os._exit(0)


def _accept_until_forked(address: str) -> None:
    """Serve connections until standard input ends, as it does when the tests end or are killed. Returns only
    in a fork, which then is a stream reader.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(16)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _become(connection)
            return
        connection.close()


def _become(connection: socket.socket) -> None:
    """Take over the streams and the environment of the process at the other end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(connection, 4, _STREAMS)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    wanted = int.from_bytes(size, "big")
    if wanted > _LONGEST_ENVIRONMENT:
        raise ValueError(f"an environment of {wanted} bytes")
    environment = bytearray()
    while len(environment) < wanted:
        received = connection.recv(wanted - len(environment))
        if not received:
            os._exit(1)
        environment += received
    os.environ.clear()
    os.environ.update(json.loads(environment))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path += [path for path in paths if os.path.isdir(path) and path not in sys.path]  # noqa: PTH112
    threading.Thread(target=_obey, args=(connection,), daemon=True).start()


def _obey(connection: socket.socket) -> None:
    while connection.recv(1):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGKILL)  # the process that Spark started is gone


def main() -> None:
    for name in _MODULES:
        importlib.import_module(name)
    del sys.modules[_RUNNER]  # each fork runs it as its main module
    gc.collect()
    gc.freeze()
    _accept_until_forked(sys.argv[1])
    sys.argv[:] = [sys.argv[0]]
    runpy.run_module(_RUNNER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
