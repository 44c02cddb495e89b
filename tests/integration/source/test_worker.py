"""Set-up done once in every Python worker of Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

pytestmark = pytest.mark.source

PROBE = """
import gc, importlib, sys, zipfile, zipimport
with zipfile.ZipFile(sys.argv[1], "w") as archive:
    archive.writestr("inside_the_zip.py", "")
sys.path.insert(0, sys.argv[1])
import inside_the_zip
from penstock.worker import settle_worker
importers = [each for each in sys.path_importer_cache.values() if isinstance(each, zipimport.zipimporter)]
(importer,) = [each for each in importers if each.archive == sys.argv[1]]
settle_worker()
frozen = gc.get_freeze_count()
settle_worker()
assert 0 < gc.get_freeze_count() == frozen
known = importer._files
importlib.invalidate_caches()
assert importer._files is known and known
"""


def test_worker_neither_reads_its_zip_files_again_nor_collects_its_modules(tmp_path: object) -> None:
    # In a separate process, because the probe changes the process.
    done = subprocess.run(
        [sys.executable, "-c", PROBE, f"{tmp_path}/inside.zip"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_workers_of_the_tests_import_pyspark_from_its_package() -> None:
    """The set-up of the tests: otherwise every worker compiles pyspark again, for two thirds of a second of
    CPU.
    """
    package = Path(pyspark.__file__).parent
    (archive,) = package.glob("python/lib/pyspark.zip")
    path = os.pathsep.join((str(archive), os.environ["PYTHONPATH"]))
    program = "import pyspark; print(pyspark.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert Path(done.stdout.strip()).parent.samefile(package)
