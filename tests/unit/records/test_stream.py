"""The buffer of the record stream."""

from __future__ import annotations

import pytest

from penstock.errors import NoRowsError
from penstock.records.stream import RecordBuffer


def test_a_buffer_that_failed_raises_the_failure_until_the_teardown() -> None:
    """A stream that is closed may fail because of that, which is no failure for its reader."""
    buffer = RecordBuffer()
    buffer.fail(RuntimeError("over"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="over"):
            buffer.next()
    buffer.teardown()
    with pytest.raises(NoRowsError, match="the record source was closed"):
        buffer.next()


def test_a_failure_after_the_teardown_is_not_raised() -> None:
    buffer = RecordBuffer()
    buffer.teardown()
    buffer.fail(RuntimeError("over"))
    with pytest.raises(NoRowsError):
        buffer.next()
