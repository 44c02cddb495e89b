"""A server that answers every connection as Postgres does when it refuses one, in a given language.

`python tests/support/refusing_server.py SEVERITY SQLSTATE MESSAGE` prints its port. It is a separate process
because libpq's ping holds Python's lock.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from contextlib import suppress

_NEGOTIATIONS = frozenset({80877103, 80877104})  # TLS, GSSAPI


def main(severity: str, code: str, message: str) -> None:
    fields = b"".join(
        kind + text.encode() + b"\0"
        for kind, text in ((b"S", severity), (b"V", "FATAL"), (b"C", code), (b"M", message))
    )
    answer = b"E" + struct.pack("!I", len(fields) + 5) + fields + b"\0"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_refuse, args=(client, answer), daemon=True).start()


def _refuse(client: socket.socket, answer: bytes) -> None:
    with client, suppress(OSError):
        while struct.unpack("!II", client.recv(8))[1] in _NEGOTIATIONS:
            client.sendall(b"N")
        client.sendall(answer)
        while client.recv(65536):
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
