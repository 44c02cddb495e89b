"""The contracts are public, import little, and expose no position."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import penstock
from penstock.contracts.capture import ChangeCapture
from penstock.position import Lsn, Position


def test_every_public_name_exists_and_no_other() -> None:
    assert not hasattr(penstock, "nothing")
    assert [name for name in penstock.__all__ if not hasattr(penstock, name)] == []


def test_no_position_is_passed_into_or_out_of_a_capture() -> None:
    for name in ("live", "snapshot", "lag"):
        signature = inspect.signature(getattr(ChangeCapture, name), eval_str=True)
        types = [parameter.annotation for parameter in signature.parameters.values()] + [
            signature.return_annotation
        ]
        assert not any(str(kind.__name__) in str(each) for each in types for kind in (Lsn, Position)), name


def test_importing_penstock_brings_neither_spark_nor_a_driver_along() -> None:
    program = (
        "import sys, penstock; sys.exit(any(name in sys.modules for name in ('pyspark', 'psycopg', "
        "'pydantic', 'pytest')))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(penstock.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", program], check=False, env=environment).returncode == 0
