"""Implementations that break one rule each, and the conformance tests that must fail for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Broken = TypeVar("Broken", bound=type)

caught: dict[Callable[..., object], list[type]] = {}
"""The implementation that breaks the rule of a test."""


def caught_by(*tests: Callable[..., object]) -> Callable[[Broken], Broken]:
    def note(broken: Broken) -> Broken:
        for test in tests:
            caught.setdefault(test, []).append(broken)
        return broken

    return note
