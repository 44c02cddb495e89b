"""What makes a small batch cheap in a Python worker of Spark.

Two things that Spark does around every task cost far more than the task, when it reads a few rows. Before it, Spark 4.1 calls
`importlib.invalidate_caches()`, upon which every zip file on the path is read again, pyspark.zip with its thousand modules among them: some
100 ms. After it, every version runs a full `gc.collect()` over all that has ever been imported. Zip files do not change under a running
worker, and imported modules are not garbage; so, once in the life of a worker, its zip importers are told to keep what they know, and the
collector to pass over what is there. A batch of one row takes a third of the time then.
"""

from __future__ import annotations

import functools
import gc
import sys
import zipimport


@functools.cache
def settle_worker() -> None:
    """Call it at the beginning of every task; it works at the first call in a process only."""
    for importer in sys.path_importer_cache.values():
        if isinstance(importer, zipimport.zipimporter):
            importer.invalidate_caches = _keep  # type: ignore[method-assign]
    gc.collect()
    gc.freeze()


def _keep() -> None:
    """In place of forgetting."""
