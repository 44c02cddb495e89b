"""What every part of the configuration is made of: a model that knows its keys, and references to secrets."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from penstock.errors import SecretError
from penstock.secret import Secret


class Model(BaseModel):
    """A part of the file. A key that is not declared is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EnvReference(Model):
    """A secret in an environment variable."""

    env: str

    def resolve(self) -> Secret:
        value = os.environ.get(self.env)
        if value is None:
            raise SecretError(f"the environment variable {self.env} is not set", hint=f"export {self.env}=…")
        return Secret(value)


class FileReference(Model):
    """A secret in a file; a trailing newline is not part of it."""

    file: Path

    def resolve(self) -> Secret:
        try:
            return Secret(self.file.read_text(encoding="utf-8").rstrip("\r\n"))
        except OSError as error:
            reason = f"the secret file {self.file} cannot be read: {error.strerror}"
            raise SecretError(reason, hint="check the path and its permissions") from error
        except UnicodeDecodeError as error:
            raise SecretError(f"the secret file {self.file} is not UTF-8", hint="write the secret as text in UTF-8") from error
