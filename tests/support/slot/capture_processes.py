"""Captures as processes, to be killed.

A line on standard input, the options of a capture as JSON, starts one and prints its pid. They are forked
from this process, which has imported everything and has no threads, so that ten processes start as fast as
one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from penstock.capture.settings import CaptureSettings
from penstock.capture.slot_capture import SpoolCapture


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            SpoolCapture(CaptureSettings.from_options(json.loads(line))).start()
            threading.Event().wait()
        print(pid, flush=True)


if __name__ == "__main__":
    main()
