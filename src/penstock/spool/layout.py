"""Where everything in a spool lies, and what it is called.

```
capture.json            who captures
capture-status.json     how it is doing
history.jsonl           which shape each table had from which position on; outlives the segments
lock                    held by the one writer
moments.lock            held while a capture by polling takes a moment of the source
segments/<end>/         manifest.json and Parquet files; a directory without manifest.json is not a segment
open/<xid>/             pieces of transactions still open
consumers/<name>.json   how far each reader has released
consumers/<name>.lock   held by that reader while it runs
tables/<name>.json      by which act each table of that reader was in the publication when it was first seen there
records.json            how far the caller of a record source has acknowledged, if that is what reads
```

The history has a line `{"format": 2}`, then a line for each version: the `position` from which it holds, and `table`, `oid`, `key` and
`columns` as in a manifest. The versions of a table are in order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from penstock.position import Position
from penstock.schema import TableName

FORMAT = 3
"""The version of everything in a spool; a reader refuses a newer one, and reads every older one.

2: a file may give its rows their xid, and a manifest may hold logical messages.
"""

MANIFEST = "manifest.json"
TOMBSTONE = "manifest.json.deleted"
"""What retention turns a manifest into: the segment is gone, and its files may be removed."""

_SEGMENT = re.compile(r"[0-9A-F]{16}")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True)
class SpoolLayout:
    root: Path

    @property
    def identity(self) -> Path:
        return self.root / "capture.json"

    @property
    def status(self) -> Path:
        return self.root / "capture-status.json"

    @property
    def history(self) -> Path:
        return self.root / "history.jsonl"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def moment_lock(self) -> Path:
        return self.root / "moments.lock"

    @property
    def records(self) -> Path:
        return self.root / "records.json"

    @property
    def segments(self) -> Path:
        return self.root / "segments"

    @property
    def open(self) -> Path:
        return self.root / "open"

    @property
    def consumers(self) -> Path:
        return self.root / "consumers"

    def segment(self, end: Position) -> Path:
        return self.segments / f"{end.value:016X}"

    def open_transaction(self, xid: int) -> Path:
        return self.open / str(xid)

    def consumer(self, name: str) -> Path:
        return self.consumers / f"{quote(name, safe='')}.json"

    def consumer_lock(self, name: str) -> Path:
        """Held by who reads under that name."""
        return self.consumers / f"{quote(name, safe='')}.lock"


def parse_segment_name(name: str) -> Position | None:
    """The end of the segment whose directory has this name; None if it is no segment's."""
    return Position.of(int(name, 16)) if _SEGMENT.fullmatch(name) else None


def consumer_name(file_name: str) -> str | None:
    """The consumer whose file this is; None for anything else that lies there."""
    return unquote(file_name.removesuffix(".json")) if file_name.endswith(".json") else None


def change_file_name(start: Position, index: int, table: TableName) -> str:
    """The name of a segment's file. The start makes it another one when the segment is captured again from elsewhere.

    It never begins with `_` or `.`, which Spark takes for hidden, and holds nothing that a path pattern would read as its own.
    """
    return f"{start.value:016X}-{index:04d}-{_UNSAFE.sub('_', str(table))[:60]}.parquet"
