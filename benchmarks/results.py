"""Stored results of a run: the figures, and the hardware of the machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from penstock import __version__

_RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("psycopg", "pyarrow", "numpy", "pyspark")


def save(name: str, figures: Mapping[str, object]) -> Path:
    """Writes one file for each run."""
    path = _RESULTS / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def machine() -> dict[str, object]:
    """The hardware, without anything that identifies the machine."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory_bytes / 1e9),
        "congestion_control": _congestion_control(),
    }


def versions(postgres: str) -> dict[str, str]:
    packages = {name: version(name) for name in _PACKAGES}
    return {
        "postgres": postgres,
        "python": platform.python_version(),
        "penstock": __version__,
        "commit": _commit(),
        **packages,
    }


def _commit() -> str:
    """The measured commit, with a mark if there are uncommitted changes."""
    described = ["git", "-C", str(_RESULTS.parent), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _congestion_control() -> str | None:
    """Determines how the server's small packets are merged, and so the rate of a client that does not control
    it.
    """
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="ascii").strip()
    except OSError:
        return None
