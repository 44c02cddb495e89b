from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.capture.factory import check_shared
from penstock.errors import ConfigError, SpoolFormatError
from penstock.position import Position
from penstock.postgres.types.column import TypePolicy
from penstock.spool.ownership import CaptureIdentity, SpoolLock, ensure_identity
from penstock.spool.status import CaptureStatus, write_status

TEXT, TYPED = TypePolicy(form="text"), TypePolicy()


def test_a_spool_that_something_else_fills_is_not_followed(tmp_path: Path) -> None:
    ensure_identity(tmp_path, CaptureIdentity("noted", "trigger", "7", 1))
    check_shared(tmp_path, "noted", "trigger", TYPED)
    with pytest.raises(SpoolFormatError, match=r"changes of noted \(trigger\), not of noted \(polling\)"):
        check_shared(tmp_path, "noted", "polling", TYPED)


@pytest.mark.parametrize(("captured", "read"), [(TEXT, TYPED), (TYPED, TEXT)])
def test_a_spool_of_text_and_a_reader_of_types_are_kept_apart(
    tmp_path: Path, captured: TypePolicy, read: TypePolicy
) -> None:
    now = datetime.now(UTC)
    with SpoolLock(tmp_path):
        write_status(
            tmp_path,
            CaptureStatus(
                "streaming", os.getpid(), Position.ZERO, Position.ZERO, 0, 0, now, numeric=captured.writes
            ),
        )
        check_shared(tmp_path, "slot", "publication", captured)
        with pytest.raises(ConfigError, match=r"writes values .*, but this pipeline reads them") as refused:
            check_shared(tmp_path, "slot", "publication", read)
    assert "separate capture and spool" in (refused.value.hint or "")
