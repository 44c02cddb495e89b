"""What every part of the configuration is made of: a model that knows its keys, and references to secrets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from penstock.errors import SecretError
from penstock.location import parse_location
from penstock.secret import FileSecret, Secret


class Model(BaseModel):
    """A part of the file. A key that is not declared is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_local(cls, value: Any, info: ValidationInfo) -> Any:
        """Every key that holds a path takes a `file:` URL too, and no other URL."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        holds_path = Path in (annotation, *get_args(annotation))
        return parse_location(value) if holds_path and isinstance(value, str | Path) else value


TrustedRoles = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[^,]+$")], ...],
    Field(
        description="roles, beside the pipeline's own and superusers, whose schemas, tables, functions and publications Penstock uses if "
        "it finds them made"
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
        """A variable of this process stays as it is."""
        return self.resolve()


class FileReference(Model):
    """A secret in a file; a trailing newline is not part of it."""

    file: Path

    def resolve(self) -> Secret:
        """What it says now."""
        return Secret(FileSecret.at(self.file).reveal())

    def follow(self) -> Secret:
        """What it says whenever that is asked for; it must say something now."""
        secret = FileSecret.at(self.file)
        secret.reveal()
        return secret
