"""What is done once in every Python worker of Spark."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.source

PROBE = """
import gc, importlib, sys, zipfile, zipimport
with zipfile.ZipFile(sys.argv[1], "w") as archive:
    archive.writestr("inside_the_zip.py", "")
sys.path.insert(0, sys.argv[1])
import inside_the_zip
from penstock.worker import settle_worker
(importer,) = [each for each in sys.path_importer_cache.values() if isinstance(each, zipimport.zipimporter) and each.archive == sys.argv[1]]
settle_worker()
frozen = gc.get_freeze_count()
settle_worker()
assert 0 < gc.get_freeze_count() == frozen
known = importer._files
importlib.invalidate_caches()
assert importer._files is known and known
"""


def test_worker_neither_reads_its_zip_files_again_nor_collects_its_modules(tmp_path: object) -> None:
    # In a process of its own: this one is to go on as it is.
    done = subprocess.run([sys.executable, "-c", PROBE, f"{tmp_path}/inside.zip"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
