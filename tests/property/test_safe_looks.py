"""A look by a column never goes past what a transaction that it did not see may still write."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.postgres.open_transactions import FirstOnes, OpenNow, SafeLooks

OPERATIONS = st.lists(st.sampled_from(["begin", "begin", "commit", "commit", "roll back", "prepare", "list", "see"]), max_size=60)


class Source:
    """Transactions that write one row each, whose value is as low as it may be: that of the moment at which they began."""

    def __init__(self) -> None:
        self.clock = 0
        self.committed: list[int] = []
        self.open: dict[str, int] = {}
        self.prepared: dict[str, int] = {}

    @property
    def unseen(self) -> list[int]:
        return [*self.open.values(), *self.prepared.values()]

    @property
    def highest(self) -> int | None:
        return max(self.committed, default=None)

    def now(self) -> OpenNow:
        return OpenNow(frozenset(self.open), bool(self.prepared))

    def do(self, operation: str, choice: int) -> None:
        self.clock += 1
        held = self.prepared if operation == "commit" and self.prepared and choice % 2 else self.open
        name = sorted(held)[choice % len(held)] if held else None
        match operation:
            case "begin":
                self.open[f"v{self.clock}"] = self.clock
            case "commit" if name is not None:
                self.committed.append(held.pop(name))
            case "roll back" if name is not None:
                held.pop(name)
            case "prepare" if name is not None:
                self.prepared[name] = self.open.pop(name)


@given(OPERATIONS, st.lists(st.integers(0, 10), min_size=60, max_size=60))
def test_nothing_below_the_next_looks_begin_appears_later(operations: list[str], choices: list[int]) -> None:
    source, safe = Source(), SafeLooks()
    highest: dict[int, int | None] = {0: None}
    found: int | None = None
    for operation, choice in zip(operations, choices, strict=False):
        if operation == "list" and found is None:
            found = safe.look(source.now())
        elif operation == "see" and found is not None:
            low = highest[found]
            highest[safe.looks] = source.highest
            found = None
            assert low is None or all(value >= low for value in source.unseen), f"{source.unseen} may still appear, below {low}"
        else:
            source.do(operation, choice)


def test_quiet_source_is_followed_and_a_long_transaction_holds_it() -> None:
    safe = SafeLooks()
    assert [safe.look(OpenNow()) for _ in range(3)] == [0, 1, 2]
    assert [safe.look(OpenNow(frozenset({"3/7"}))) for _ in range(3)] == [2, 2, 2]
    assert [safe.look(OpenNow(is_prepared=True)) for _ in range(2)] == [2, 2]
    assert safe.look(OpenNow()) == 8


@given(OPERATIONS, st.lists(st.integers(0, 10), min_size=60, max_size=60))
def test_first_ones_are_gone_only_when_all_have_ended(operations: list[str], choices: list[int]) -> None:
    source, first = Source(), FirstOnes()
    left: set[int] | None = None
    for operation, choice in zip(operations, choices, strict=False):
        if operation in ("list", "see"):
            left = set(source.unseen) if left is None else left
            if first.look(source.now()):
                assert not left & set(source.unseen)
        else:
            source.do(operation, choice)
