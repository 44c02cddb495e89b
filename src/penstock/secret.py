"""Secrets: values that print as stars and are only returned by `reveal()`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from penstock import storage
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
    """A secret in a file that may be rotated, such as a token.

    Every `reveal` reads the file and returns its text without the trailing newline.

    Pickling stores the current value, because the file may exist only on this machine.
    """

    @classmethod
    def at(cls, path: Path) -> FileSecret:
        return cls(str(path.absolute()))

    @property
    def path(self) -> Path:
        return Path(self._value)

    def reveal(self) -> str:
        try:
            found = storage.read_text(self.path).rstrip("\r\n")
        except OSError as error:
            reason = f"the secret file {self.path} cannot be read: {error.strerror}"
            raise SecretError(reason, hint="check the path and its permissions") from error
        except UnicodeDecodeError as error:
            raise SecretError(
                f"the secret file {self.path} is not UTF-8", hint="write the secret as text in UTF-8"
            ) from error
        if not found:
            raise SecretError(
                f"the secret file {self.path} is empty",
                hint="write the secret to a temporary file, then rename that file to this path",
            )
        return found

    def __reduce__(self) -> tuple[object, ...]:
        return Secret, (self.reveal(),)
