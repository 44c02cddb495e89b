"""A value that must not be seen: it prints as stars, and only `reveal()` gives it out. Where it is kept in a file, it is what the file says
by then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import SecretError


@dataclass(frozen=True, slots=True)
class Secret:
    """Wraps a password or token so that no log line, error or repr can show it by accident."""

    _value: str = field(repr=False)

    def reveal(self) -> str:
        return self._value

    def __str__(self) -> str:
        return "***"

    def __repr__(self) -> str:
        return "Secret(***)"


@dataclass(frozen=True, slots=True, repr=False)
class FileSecret(Secret):
    """A secret that is replaced from time to time, such as a token: read anew whenever it is asked for; a trailing newline is not part of
    it. What goes to another process by pickle is the value of that moment, since the file may be on this machine alone."""

    @classmethod
    def at(cls, path: Path) -> FileSecret:
        return cls(str(path.absolute()))

    @property
    def path(self) -> Path:
        return Path(self._value)

    def reveal(self) -> str:
        try:
            found = self.path.read_text(encoding="utf-8").rstrip("\r\n")
        except OSError as error:
            reason = f"the secret file {self.path} cannot be read: {error.strerror}"
            raise SecretError(reason, hint="check the path and its permissions") from error
        except UnicodeDecodeError as error:
            raise SecretError(f"the secret file {self.path} is not UTF-8", hint="write the secret as text in UTF-8") from error
        if not found:
            raise SecretError(f"the secret file {self.path} is empty", hint="write it under another name, then rename it into place")
        return found

    def __reduce__(self) -> tuple[object, ...]:
        return Secret, (self.reveal(),)
