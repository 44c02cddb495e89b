"""Fixtures for all tests, and the order in which tests run.

Each plugin provides one kind of fixture. Folders are layers by cost: tests run in random order within a
layer, but cheap layers come first, so that a simple mistake shows in seconds.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import settings

# The duration of an example depends more on the load of the machine than on the code.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")

pytest_plugins = [
    "tests.support.fix_scratch",
    "tests.support.fix_postgres",
    "tests.support.fix_roles",
    "tests.support.fix_captured",
    "tests.support.fix_check",
    "tests.support.fix_proxy",
    "tests.support.fix_spark",
    "tests.support.fix_pipeline",
    "tests.support.fix_registry",
    "tests.support.fix_catalog",
]

_LAYERS = ("unit", "property", "contract", "integration", "recovery", "acceptance")
_MARKED_LAYERS = frozenset({"recovery", "acceptance"})
_LAYERS_OF_MARK = {
    "spark": ("contract", "integration", "recovery", "acceptance"),
    "source": ("integration",),
    "recovery": ("recovery",),
    "acceptance": ("acceptance",),
}
"""The Makefile names the directories of each suite: a test with the mark in another layer would run in none.
"""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Set marks before `-m` selects tests."""
    layer = _layer(item)
    if layer in _MARKED_LAYERS:
        item.add_marker(layer)
    if "spark" in getattr(item, "fixturenames", ()):
        item.add_marker("spark")
    for mark, layers in _LAYERS_OF_MARK.items():
        if item.get_closest_marker(mark) is not None and layer not in layers:
            raise pytest.UsageError(
                f"{item.nodeid} is marked {mark}, which the suites run only in {', '.join(layers)}"
            )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _LAYERS.index(_layer(item)))


def pytest_collection_finish() -> None:
    """Exclude the imported modules and the collected tests from garbage collection: visiting these objects
    again and again took half of the CPU time of the suites without Spark.
    """
    gc.collect()
    gc.freeze()


def _layer(item: pytest.Item) -> str:
    layer = item.path.relative_to(Path(__file__).parent).parts[0]
    if layer not in _LAYERS:
        raise pytest.UsageError(f"{item.path} is in none of the layers {', '.join(_LAYERS)}")
    return layer
