"""What a mechanism has to give for its changes to go into the spool: polling, triggers, or anything else that is asked and answers.

A feed is looked at again and again. Each look brings whole transactions, in the form that the spool takes, and ends at a *mark*: a place,
and the mechanism's own words for where it is. The bridge (`FeedCapture`) puts both into the spool in one act, hands the mark back once all
consumers have released it, and gives the last one that counts to the next session. So a feed keeps one thing durable, the mark that was
confirmed to it last, and nothing in memory that it could not do without.

Positions are the mechanism's own. They only go up, also over restarts and when everything but the source is lost, since targets compare
them with what they hold. The easiest such number is the server's own: see `penstock.postgres.moments`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from typing_extensions import override

from penstock.change import LogStep
from penstock.position import Position
from penstock.postgres.timeline import SystemIdentity


@dataclass(frozen=True, slots=True)
class Mark:
    """Everything that the source had shown up to `position` has been given out; `state` says how to go on from there."""

    position: Position
    state: str = ""
    """In words that only the feed understands. It stands in manifests and in the source, so it holds no secret and no value of a row."""


class FeedSession(AbstractContextManager["FeedSession"], ABC):
    """A feed while it is being read, by one thread. It owns its connections until `close`."""

    @property
    @abstractmethod
    def system(self) -> SystemIdentity:
        """Whose changes these are."""

    @property
    @abstractmethod
    def mark(self) -> Mark:
        """Where the last look ends. Known by the time that the look's last step is given out."""

    @abstractmethod
    def look(self) -> Iterator[LogStep]:
        """Ask the source once; give out what is new since the last look, as steps of the log. Nothing new, no step.

        Called about every `interval_seconds`, and read to its end unless something fails; then the session is closed, and another opened
        at the last mark that the spool holds. Steps are `Transactions`, or, of one too large for memory, pieces and their commit; their
        positions lie between the mark before and the new one, and the last step ends at the new one. A step without
        rows has the mark kept at once, though nothing is new.
        """

    @abstractmethod
    def confirm(self, mark: Mark) -> None:
        """No consumer needs anything up to this mark any more: make it the one that `ChangeFeed.ensure` gives, durably.

        Called with marks of this session or of former ones, in order, between two looks. The usual mistake is to do this when changes
        were given out.
        """

    @property
    def has_more(self) -> bool:
        """Whether the last look left something behind, so that there is no reason to pause."""
        return False

    def close(self) -> None:
        """Let go of everything. May be called more than once."""

    @override
    def __exit__(self, *_: object) -> None:
        self.close()


class ChangeFeed(ABC):
    """A description of what to ask: a value, which holds nothing open."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Tells this feed from all others of the same source; a spool belongs to one for life."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """The mechanism: `polling`, `trigger`."""

    @property
    def interval_seconds(self) -> float:
        """How long to pause between two looks when nothing is left behind."""
        return 1.0

    @abstractmethod
    def ensure(self) -> Mark:
        """The mark that was confirmed last; if there is none, make one, durably: what commits from now on is after it."""

    @abstractmethod
    def open(self, mark: Mark) -> FeedSession:
        """Go on after `mark`: the one that was confirmed last, or a later one that the spool holds."""
