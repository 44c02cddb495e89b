"""`penstock` with its log in a file: a line of JSON for each record, on disk before the next step."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from penstock.cli.main import main

_PLAIN = frozenset(vars(logging.makeLogRecord({})))


class _Lines(logging.Handler):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._stream = path.open("a", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        facts = {name: value for name, value in vars(record).items() if name not in _PLAIN}
        self._stream.write(
            json.dumps({"at": record.created, "message": record.getMessage(), **facts}, default=str) + "\n"
        )
        self._stream.flush()


if __name__ == "__main__":
    log = logging.getLogger("penstock")
    log.setLevel(logging.INFO)
    log.addHandler(_Lines(Path(sys.argv.pop(1))))
    main()
