"""Let Spark's Python workers import pyspark from its package instead of from `pyspark.zip`.

Python runs this module at the start of every process that has this directory on its PYTHONPATH. Spark puts an
archive of pyspark before everything else on the path of its workers. Python keeps no compiled modules of an
archive, so each worker compiles some hundred modules again, which is two thirds of a second of CPU. The
installed package holds the same files, with compiled modules beside them.

Workers also invalidate the import caches before each task, and then read the directory of each archive again,
which is a tenth of a second. So the finders of the archives are removed too.
"""

from __future__ import annotations

import importlib.machinery
import sys

_ARCHIVES = (".zip", ".jar")


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
