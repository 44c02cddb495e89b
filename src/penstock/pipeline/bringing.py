"""Apply one epoch to one table: validate values, evolve the target, divert rejected rows to the dead-letter queue, write the rest."""

from __future__ import annotations

import time
from dataclasses import dataclass

from penstock.errors import SinkError
from penstock.pipeline.following.follower import Follower
from penstock.pipeline.letters.box import LetterBox
from penstock.position import Position
from penstock.postgres.types.policy import TypePolicy
from penstock.retry import Backoff
from penstock.schema import TableName
from penstock.sinks.base import Sink, TableChanges, Target
from penstock.spool.values import check_identified, check_values

_QUICK_ATTEMPTS = 3
_QUICK_PAUSE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Bringer:
    """Used by the threads of an epoch, each for tables of its own."""

    sink: Sink
    types: TypePolicy
    follower: Follower | None
    letters: LetterBox | None

    def is_due(self, name: TableName) -> bool:
        """Whether letters of the table are to be applied."""
        return self.letters is not None and self.letters.is_due(name)

    def bring_quickly(self, target: Target, changes: TableChanges, end: Position) -> Target | None:
        """As `bring`, again at once if a commit met another one."""
        quick = Backoff(_QUICK_PAUSE_SECONDS)
        while True:
            try:
                return self.bring(target, changes, end)
            except SinkError as error:
                pause = quick.fail()
                if quick.failures >= _QUICK_ATTEMPTS or type(error) is not SinkError:
                    raise
                time.sleep(pause)

    def bring(self, target: Target, changes: TableChanges, end: Position) -> Target | None:
        """Bring one table to `end`. Gives the target as it is then; None if there was nothing to do."""
        follower, letters = self.follower, self.letters
        check_identified(changes.slices)
        if letters is None:
            check_values(changes.table, changes.slices, refuse_inexact=self.types.refuses_inexact)
        else:
            changes = letters.with_letters(target, changes, end, lambda slice: follower is None or follower.is_followed(target, slice))
        followed = changes if follower is None else follower.follow(self.sink, target, changes, end)
        if not followed.slices and followed.evolution is None and not self.is_due(changes.table):
            return None
        if letters is None:
            self.sink.apply(target, followed, end)
        else:
            letters.apply(self.sink, target, followed, end)
        return target if followed.evolution is None else self.sink.load_target(changes.table) or target
