"""Reduce the overhead of small tasks in Spark's Python workers.

Spark does two things around every task that cost more than a task of a few rows. Before it, Spark 4.1 calls
`importlib.invalidate_caches()`. Python then reads every zip file on `sys.path` again, among them pyspark.zip
with its thousand modules, which takes about 100 ms. After it, every version runs a full `gc.collect()` over
all imported modules. Zip files do not change while a worker runs, and imported modules are not garbage. So
`settle_worker`, once per worker process, makes the zip importers keep their caches and excludes existing
objects from garbage collection. A batch of one row then takes a third of the time.
"""

from __future__ import annotations

import functools
import gc
import sys
import zipimport


@functools.cache
def settle_worker() -> None:
    """Make the zip importers keep their caches, and exclude existing objects from garbage collection.

    Call it at the start of every task; only the first call in a process has an effect.
    """
    for importer in sys.path_importer_cache.values():
        if isinstance(importer, zipimport.zipimporter):
            importer.invalidate_caches = _skip  # type: ignore[method-assign]
    gc.collect()
    gc.freeze()


def _skip() -> None:
    """Replacement for `invalidate_caches` that does nothing."""
