"""A poll by a cursor column never passes a value that an open transaction may still write."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.postgres.polled_tables import InitialTransactions, OpenTransactions, SafePolls
from tests.support.rounds import rounds

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "commit", "commit", "roll back", "prepare"]), st.integers(0, 5)
    ),
    max_size=4,
)
LOOKS = st.lists(st.tuples(EVENTS, EVENTS), min_size=2, max_size=7)
"""For each poll: the events before it lists the open transactions, and those between that and its snapshot.
"""


class Source:
    """Transactions that write one row each, with the lowest possible value: the time at which they began."""

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

    def now(self) -> OpenTransactions:
        return OpenTransactions(frozenset(self.open), bool(self.prepared))

    def do_all(self, events: list[tuple[str, int]]) -> None:
        for operation, choice in events:
            self.do(operation, choice)

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


# One begins between the list and the snapshot of a poll, and a later one commits in between.
@example([([], []), ([], [("begin", 0), ("begin", 0), ("commit", 1)]), ([], [])])
@settings(max_examples=rounds(100))
@given(LOOKS)
def test_nothing_below_the_next_looks_begin_appears_later(
    looks: list[tuple[list[tuple[str, int]], list[tuple[str, int]]]],
) -> None:
    source, safe = Source(), SafePolls()
    highest: dict[int, int | None] = {0: None}
    for before, between in looks:
        source.do_all(before)
        low = highest[safe.next_poll(source.now())]
        source.do_all(between)
        highest[safe.polls] = source.highest
        assert low is None or all(value >= low for value in source.unseen), (
            f"{source.unseen} may still appear, below {low}"
        )


def test_quiet_source_is_followed_and_a_long_transaction_holds_it() -> None:
    safe = SafePolls()
    assert [safe.next_poll(OpenTransactions()) for _ in range(3)] == [0, 1, 2]
    assert [safe.next_poll(OpenTransactions(frozenset({"3/7"}))) for _ in range(3)] == [2, 2, 2]
    assert [safe.next_poll(OpenTransactions(is_prepared=True)) for _ in range(2)] == [2, 2]
    assert safe.next_poll(OpenTransactions()) == 8


@settings(max_examples=rounds(100))
@given(LOOKS)
def test_first_ones_are_gone_only_when_all_have_ended(
    looks: list[tuple[list[tuple[str, int]], list[tuple[str, int]]]],
) -> None:
    source, first = Source(), InitialTransactions()
    left: set[int] | None = None
    for before, between in looks:
        source.do_all(before)
        left = set(source.unseen) if left is None else left
        if first.have_ended(source.now()):
            assert not left & set(source.unseen)
        source.do_all(between)
