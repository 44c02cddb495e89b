"""What every test may ask for, and the order in which tests run.

Each plugin is one kind of thing that a test runs against. Folders are layers by cost: the order is random within a layer, but cheap
layers come first, so that a plain mistake shows in seconds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says more about who else uses the machine than about the code.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")

pytest_plugins = [
    "tests.fix_postgres",
    "tests.fix_roles",
    "tests.fix_captured",
    "tests.fix_check",
    "tests.fix_proxy",
    "tests.fix_spark",
    "tests.fix_pipeline",
    "tests.fix_registry",
    "tests.fix_catalog",
]

_LAYERS = ("unit", "property", "contract", "integration", "recovery", "acceptance")
_MARKED_LAYERS = frozenset({"recovery", "acceptance"})


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks must be there before `-m` chooses among the tests."""
    layer = _layer(item)
    if layer in _MARKED_LAYERS:
        item.add_marker(layer)
    if "spark" in getattr(item, "fixturenames", ()):
        item.add_marker("spark")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _LAYERS.index(_layer(item)))


def _layer(item: pytest.Item) -> str:
    layer = item.path.relative_to(Path(__file__).parent).parts[0]
    if layer not in _LAYERS:
        raise pytest.UsageError(f"{item.path} lies in none of the layers {', '.join(_LAYERS)}")
    return layer
