"""Let Spark's Python workers start quickly: import pyspark from its package, and fork stream readers.

Python runs this module at the start of every process that has this directory on its PYTHONPATH. Spark puts an
archive of pyspark before everything else on the path of its workers. Python keeps no compiled modules of an
archive, so each worker compiles some hundred modules again, which is two thirds of a second of CPU. The
installed package holds the same files, with compiled modules beside them.

Workers also invalidate the import caches before each task, and then read the directory of each archive again,
which is a tenth of a second. So the finders of the archives are removed too.

Spark starts a new process for the stream reader of each query. Its imports take half a second of CPU, which
is most of what a short query needs. If `reader_server.py` runs, such a process asks it for a fork instead,
which has all modules, and only passes signals on to it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys

_ARCHIVES = (".zip", ".jar")
_STREAM_READER = ["-m", "pyspark.sql.streaming.python_streaming_source_runner"]


def _installed(paths: list[str]) -> bool:
    return importlib.machinery.PathFinder.find_spec("pyspark", paths) is not None


def use_installed_pyspark() -> None:
    """Drop Spark's archives from `sys.path`, unless pyspark is nowhere else."""
    kept = [path for path in sys.path if not (path.endswith(_ARCHIVES) and "/pyspark/" in path)]
    if len(kept) < len(sys.path) and _installed(kept):
        for path in set(sys.path) - set(kept):
            sys.path_importer_cache.pop(path, None)
        sys.path[:] = kept


use_installed_pyspark()

if sys.orig_argv[-2:] == _STREAM_READER and "PENSTOCK_TEST_READER_SERVER" in os.environ:
    importlib.import_module("reader_server").run_forked(os.environ["PENSTOCK_TEST_READER_SERVER"])
