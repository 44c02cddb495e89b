"""Contracts of schemas: schemas of partitions, and schema registries.

Both are optional interfaces of a `SourceConnector`, which returns them from `as_schema_provider` and
`as_schema_registry_aware`. A partition is what `SourceBatch.partition` names: for a database, a table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import pyarrow as pa


class SchemaProvider(ABC):
    """Schemas of each partition, current and at earlier positions of the stream."""

    @abstractmethod
    def partitions(self) -> tuple[str, ...]:
        """The partitions with a known schema, in name order."""

    @abstractmethod
    def schema_of(self, partition: str, offset: str | None = None) -> pa.Schema | None:
        """The schema of batches of `partition`; None if unknown.

        With an `offset` of a checkpoint, it is the schema at that position of the stream, which may differ
        from the one in the current catalog. Called at any time between `open` and `close`, from any thread.
        """


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """A schema in a registry."""

    subject: str
    id: int
    """Identifies the schema in all subjects; serialized records contain it."""
    version: int
    """Number of the schema within the subject, from 1."""
    text: str
    """The schema itself, in the registry's JSON form (Avro)."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """Whether a schema may follow the existing ones of a subject, by the subject's rule in the registry."""

    is_compatible: bool
    reasons: tuple[str, ...] = ()
    """The registry's reasons if the schema is not compatible."""


class SchemaRegistryAware(ABC):
    """Registers the schemas of its partitions in a registry, so that others can read the data.

    Every call is a request over the network with a time limit; it raises `RegistryError` if there is no
    response. `poll_batch` calls none of these methods: a registry that is down must not block the stream.
    """

    @abstractmethod
    def subject_of(self, partition: str) -> str:
        """The name under which the registry has the schemas of `partition`. Sends no request."""

    @abstractmethod
    def register_schema(self, partition: str) -> RegisteredSchema:
        """Make the partition's current schema the latest of its subject. An existing schema is not added
        again.

        Raises `SchemaIncompatibleError` if the subject's compatibility rule rejects it.
        """

    @abstractmethod
    def look_up_schema(self, partition: str, version: int | None = None) -> RegisteredSchema | None:
        """The latest registered schema of `partition`, or a given version; None if there is none."""

    @abstractmethod
    def check_compatibility(self, partition: str) -> Compatibility:
        """Whether the partition's current schema could be registered. Registers nothing. A subject without
        schemas accepts any.
        """
