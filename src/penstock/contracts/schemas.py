"""What a source can say about the shape of its rows, and what it has to do with a schema registry.

Both are optional capabilities of a `SourceConnector`, asked for by `as_schema_provider` and `as_schema_registry_aware`. A partition is what
a `SourceBatch` names: for a database, a table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import pyarrow as pa


class SchemaProvider(ABC):
    """Knows the shape of each partition, now and at earlier places of the stream."""

    @abstractmethod
    def partitions(self) -> tuple[str, ...]:
        """The partitions whose shape is known, in name order."""

    @abstractmethod
    def schema_of(self, partition: str, offset: str | None = None) -> pa.Schema | None:
        """The schema that batches of `partition` have; None if it is not known.

        With an `offset`, as a checkpoint holds it, the one that they had at that place of the stream: a source whose tables change their
        shape must not answer with the catalog of now. Called at any time between `open` and `close`, from any thread.
        """


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """A schema as a registry keeps it."""

    subject: str
    id: int
    """Under which it is found whatever the subject; what serialized records carry."""
    version: int
    """Counts the schemas of the subject, from 1."""
    text: str
    """The schema itself, as JSON of the registry's kind (Avro)."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """Whether a schema may follow those that a subject has, by the rule that the registry holds for it."""

    is_compatible: bool
    reasons: tuple[str, ...] = ()
    """Why it may not, in the registry's words."""


class SchemaRegistryAware(ABC):
    """Keeps the shapes of its partitions in a registry, so that others can read what it wrote.

    Every call is a question to a server over the network, bounded in time; it raises `RegistryError` if there is no answer. Nothing here is
    called by `poll_batch`: a registry that is down must not hold up the stream.
    """

    @abstractmethod
    def subject_of(self, partition: str) -> str:
        """The name under which the registry keeps the schemas of `partition`. Asks nobody."""

    @abstractmethod
    def register_schema(self, partition: str) -> RegisteredSchema:
        """Make the partition's schema of now the latest of its subject. One that is there already is not added a second time.

        Raises `SchemaIncompatibleError` if the subject's rule does not let it follow the others.
        """

    @abstractmethod
    def look_up_schema(self, partition: str, version: int | None = None) -> RegisteredSchema | None:
        """What the registry has for `partition`: the latest, or a certain version. None if it has none."""

    @abstractmethod
    def check_compatibility(self, partition: str) -> Compatibility:
        """Whether the partition's schema of now could be registered. Registers nothing. A subject without schemas takes any."""
