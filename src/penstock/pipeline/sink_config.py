"""Where the tables go: one kind of sink, with its options."""

from __future__ import annotations

from pathlib import Path

from pydantic import model_validator

from penstock.pipeline.references import Model


class DeltaConfig(Model):
    """Delta tables in a directory: a table lands in <path>/<schema>/<table>."""

    path: Path

    @property
    def root(self) -> Path:
        return self.path

    def resolved(self, base: Path) -> DeltaConfig:
        return self.model_copy(update={"path": base / self.path})


class SinkConfig(Model):
    """Where the tables go: one of these."""

    delta: DeltaConfig | None = None

    @model_validator(mode="after")
    def _one(self) -> SinkConfig:
        if len(self._given()) != 1:
            raise ValueError(f"give one of {', '.join(type(self).model_fields)}")
        return self

    @property
    def root(self) -> Path:
        """The directory where the target keeps, beside its tables, what is known of its epochs and of unfinished snapshots."""
        return next(iter(self._given().values())).root

    def resolved(self, base: Path) -> SinkConfig:
        """Paths in the file are relative to the file."""
        return self.model_copy(update={name: each.resolved(base) for name, each in self._given().items()})

    def _given(self) -> dict[str, DeltaConfig]:
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
