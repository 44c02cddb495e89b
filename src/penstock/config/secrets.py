"""Building blocks of the configuration: the strict base model, `{env: …}` and `{file: …}` secrets,
durations.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from penstock.errors import SecretError
from penstock.location import parse_location
from penstock.secret import FileSecret, Secret


class Model(BaseModel):
    """Base class of the configuration file's sections. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_local(cls, value: Any, info: ValidationInfo) -> Any:
        """Convert a path field. Accepts a path or a `file:` URL; any other URL is an error."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        holds_path = Path in (annotation, *get_args(annotation))
        return parse_location(value) if holds_path and isinstance(value, str | Path) else value


TrustedRoles = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[^,]+$")], ...],
    Field(
        description="Roles whose existing schemas, tables, functions and publications Penstock may use, in "
        "addition to its "
        "own role and those that can act as it, such as superusers."
    ),
]


class EnvReference(Model):
    """A secret in an environment variable."""

    env: str

    def resolve(self) -> Secret:
        value = os.environ.get(self.env)
        if value is None:
            raise SecretError(f"the environment variable {self.env} is not set", hint=f"export {self.env}=…")
        return Secret(value)

    def follow(self) -> Secret:
        """Return the secret. Does the same as `resolve`, because environment variables of this process do not
        change.
        """
        return self.resolve()


class FileReference(Model):
    """A secret in a file; a trailing newline is not part of it."""

    file: Path

    def resolve(self) -> Secret:
        """Return the current content of the file as a secret."""
        return Secret(FileSecret.at(self.file).reveal())

    def follow(self) -> Secret:
        """Return a secret that reads the file at each use. Raises an error if the file cannot be read now."""
        secret = FileSecret.at(self.file)
        secret.reveal()
        return secret


_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|millisecond|s|second|min|minute|h|hour|d|day)s?\s*")
_SECONDS = {
    "ms": 0.001,
    "millisecond": 0.001,
    "s": 1,
    "second": 1,
    "min": 60,
    "minute": 60,
    "h": 3600,
    "hour": 3600,
    "d": 86400,
    "day": 86400,
}


def parse_seconds(duration: str) -> float:
    match = _DURATION.fullmatch(duration)
    if match is None:
        raise ValueError("write a duration such as '1 second' or '500 ms'")
    return float(match[1]) * _SECONDS[match[2]]


def checked_duration(value: str) -> str:
    """Return the duration `value` unchanged, or raise `ValueError` if it is not valid."""
    parse_seconds(value)
    return value
