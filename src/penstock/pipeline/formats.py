"""Documents that a newer version of Penstock wrote: refused by name, and not taken for broken ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import SpoolFormatError


def check_format(document: Mapping[str, Any], newest: int, where: Path) -> None:
    """Raise for a format later than `newest`. Every older one is read."""
    written = document.get("format", 1)
    if written > newest:
        raise SpoolFormatError(
            f"{where} has format {written}; this version of penstock reads up to {newest}",
            hint="run the version of penstock that wrote it, or a newer one",
        )
