"""Opening data files of a target table, with errors that name the file and never quote its contents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import SinkError, TargetFileLostError
from penstock.foreign import describe


@contextmanager
def open_data_file(path: str | Path) -> Iterator[pq.ParquetFile]:
    """`TargetFileLostError` if the file is missing or not Parquet; `SinkError` for whatever goes wrong while it is read."""
    file: pq.ParquetFile | None = None
    try:
        # Spark writes times in a form that has no unit; nanoseconds would not hold all of them.
        with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
            yield file
    except FileNotFoundError as error:
        raise TargetFileLostError(f"the file {path} of the target is missing") from error
    except (OSError, ValueError, pa.ArrowException) as error:
        is_damaged = file is None and not (isinstance(error, OSError) and error.errno is not None)
        kind = TargetFileLostError if is_damaged else SinkError
        raise kind(f"the file {path} of the target cannot be read: {describe(error)}") from error


def data_file_bytes(path: str | Path) -> int:
    """How long the file is; `TargetFileLostError` if it is missing."""
    try:
        return Path(path).stat().st_size
    except FileNotFoundError as error:
        raise TargetFileLostError(f"the file {path} of the target is missing") from error
