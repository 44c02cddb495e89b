from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.capture.following import check_shared
from penstock.errors import ConfigError
from penstock.position import Position
from penstock.postgres.types.policy import TypePolicy
from penstock.spool.lock import SpoolLock
from penstock.spool.status import CaptureStatus, write_status

TEXT, TYPED = TypePolicy(form="text"), TypePolicy()


@pytest.mark.parametrize(("captured", "read"), [(TEXT, TYPED), (TYPED, TEXT)])
def test_a_spool_of_text_and_a_reader_of_types_are_kept_apart(tmp_path: Path, captured: TypePolicy, read: TypePolicy) -> None:
    now = datetime.now(UTC)
    with SpoolLock(tmp_path):
        write_status(tmp_path, CaptureStatus("streaming", os.getpid(), Position.ZERO, Position.ZERO, 0, 0, now, numeric=captured.writes))
        check_shared(tmp_path, "slot", "publication", captured)
        with pytest.raises(ConfigError, match=r"writes values .*, and this pipeline reads them") as refused:
            check_shared(tmp_path, "slot", "publication", read)
    assert "a spool of their own" in (refused.value.hint or "")
