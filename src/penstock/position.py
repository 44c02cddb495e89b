"""Where we are in the write-ahead log.

An `Lsn` is any address in the WAL. A `Position` is the address at which a commit record *ends*, and is the only thing that is ever
stored, compared or confirmed: an LSN alone does not tell two changes apart, since the first change of a transaction may carry the
LSN at which the previous commit ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Self

_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


@dataclass(frozen=True, order=True, slots=True)
class Lsn:
    """A WAL address; prints as Postgres prints it, `0/16B3748`."""

    value: int

    def __post_init__(self) -> None:
        if not 0 <= self.value < 1 << 64:
            raise ValueError(f"an LSN has 64 bits, not {self.value}")

    @classmethod
    def parse(cls, text: str) -> Self:
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"not an LSN: {text!r}")
        return cls((int(match[1], 16) << 32) | int(match[2], 16))

    def __str__(self) -> str:
        return f"{self.value >> 32:X}/{self.value & 0xFFFFFFFF:X}"

    def __sub__(self, other: Lsn) -> int:
        """The distance in bytes."""
        return self.value - other.value


@dataclass(frozen=True, order=True, slots=True)
class Position:
    """The end of a commit record, or a quiet place between two commits that the server vouched for."""

    lsn: Lsn

    ZERO: ClassVar[Position]

    @classmethod
    def of(cls, value: int) -> Self:
        return cls(Lsn(value))

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(Lsn.parse(text))

    @property
    def value(self) -> int:
        """As a number, for `_commit_version` columns and for targets that store a long."""
        return self.lsn.value

    def __str__(self) -> str:
        return str(self.lsn)

    def __sub__(self, other: Position) -> int:
        return self.lsn - other.lsn


Position.ZERO = Position(Lsn(0))
