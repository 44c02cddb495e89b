"""Addresses in the write-ahead log.

An `Lsn` is any address in the WAL. A `Position` is the end LSN of a commit record, and the only address that
is stored, compared or confirmed. LSNs of changes are not unique: the first change of a transaction may carry
the LSN at which the previous commit ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Self

_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


@dataclass(frozen=True, order=True, slots=True)
class Lsn:
    """A WAL address, printed as in Postgres: `0/16B3748`."""

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
    """The end of a commit record, or an address between two commits up to which the server has sent
    everything.
    """

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
        """The position as an integer, for `_commit_version` columns and targets that store a long."""
        return self.lsn.value

    def __str__(self) -> str:
        return str(self.lsn)

    def __sub__(self, other: Position) -> int:
        return self.lsn - other.lsn


Position.ZERO = Position(Lsn(0))
