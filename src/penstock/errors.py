"""All errors of Penstock.

Every error has a stable code, a `Recovery` that decides whether it is retried, and, where an operator can fix
it, a hint with the exact fix. Code that raises an error only chooses its class; `penstock.pipeline` and
`penstock.capture` decide from `Recovery` whether to retry. Spark passes exceptions on as text, so the code is
part of the message. No error contains a row value or a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import ClassVar, Self


class Recovery(Enum):
    """How Penstock reacts to an error."""

    RETRY = "retry"
    """Retry with backoff, from the same position."""
    OPERATOR = "operator"
    """Stop. An operator must act; the hint has the fix."""
    FATAL = "fatal"
    """Stop. This should be impossible, and continuing could damage data."""


class PenstockError(Exception):
    """Base class of all errors of Penstock."""

    code: ClassVar[str] = "PEN-0000"
    recovery: ClassVar[Recovery] = Recovery.FATAL

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.code}: {self.message}"
        return f"{text}\n  fix: {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint)


def parse_error(text: str) -> PenstockError | None:
    """The Penstock error in the text of an exception from Spark. The text may be a traceback.

    None if the text contains no known error code.
    """
    match = re.search(r"(PEN-\d{4}): (.*)(?:\n  fix: (.*))?", text)
    cls = find_error(match[1]) if match else None
    return cls(match[2], hint=match[3]) if match and cls else None


def find_error(code: str) -> type[PenstockError] | None:
    """The error class with this code, or None."""

    def family(cls: type[PenstockError]) -> Iterator[type[PenstockError]]:
        yield cls
        for child in cls.__subclasses__():
            yield from family(child)

    return next((cls for cls in family(PenstockError) if cls.code == code), None)


def _rebuild(cls: type[PenstockError], message: str, hint: str | None) -> PenstockError:
    return cls(message, hint=hint)


# --- configuration ------------------------------------------------------------------------------------------


class ConfigError(PenstockError):
    """The configuration cannot be read, or is invalid."""

    code = "PEN-1001"
    recovery = Recovery.OPERATOR


class SecretError(PenstockError):
    """The environment variable or file that a secret refers to does not exist or cannot be read."""

    code = "PEN-1002"
    recovery = Recovery.OPERATOR


class EnvironmentUnfitError(PenstockError):
    """This machine lacks something that Penstock needs: Java, a package, a writable directory."""

    code = "PEN-1003"
    recovery = Recovery.OPERATOR


class NoTableError(ConfigError):
    """No table is configured from which to read records."""

    code = "PEN-1011"


class InvalidUrlError(ConfigError):
    """The URL of the source is missing or invalid, or no database can be reached at it."""

    code = "PEN-1012"


# --- the source: connection and server ----------------------------------------------------------------------


class SourceError(PenstockError):
    """The Postgres server rejected an operation for a reason that no other code describes."""

    code = "PEN-1100"
    recovery = Recovery.OPERATOR


class ConnectionLostError(PenstockError):
    """The server cannot be reached, or the connection was lost."""

    code = "PEN-1101"
    recovery = Recovery.RETRY


class AuthenticationError(PenstockError):
    """The server rejected the role, its password or its certificate."""

    code = "PEN-1102"
    recovery = Recovery.OPERATOR


class WalLevelError(PenstockError):
    """The server's `wal_level` is not `logical`."""

    code = "PEN-1103"
    recovery = Recovery.OPERATOR


class PrivilegeError(PenstockError):
    """The role lacks a privilege that the capture needs."""

    code = "PEN-1104"
    recovery = Recovery.OPERATOR


class PublicationError(PenstockError):
    """The publication does not exist, or leaves out operations, columns or rows that a target needs."""

    code = "PEN-1105"
    recovery = Recovery.OPERATOR


class ServerUnfitError(PenstockError):
    """The server cannot be used as a source: too old, read-only for the role, or behind a connection pooler
    without replication.
    """

    code = "PEN-1106"
    recovery = Recovery.OPERATOR


class UntrustedObjectError(PrivilegeError):
    """An existing schema, table, function or publication that Penstock needs belongs to an untrusted role or
    has another definition.
    """

    code = "PEN-1108"


class LockWaitError(PenstockError):
    """Another session holds a lock that is needed to alter the publication."""

    code = "PEN-1107"
    recovery = Recovery.RETRY


# --- the source: slot and position --------------------------------------------------------------------------


class SlotMissingError(PenstockError):
    """The slot (or, with polling, the resume position) no longer exists: changes since the targets were last
    updated are lost.
    """

    code = "PEN-1201"
    recovery = Recovery.OPERATOR


class SlotBusyError(PenstockError):
    """Another process is reading the slot."""

    code = "PEN-1202"
    recovery = Recovery.RETRY


class SlotForeignError(PenstockError):
    """The slot exists but cannot be used; PEN-1207 to PEN-1211 give the reason."""

    code = "PEN-1203"
    recovery = Recovery.OPERATOR


class SlotLostError(PenstockError):
    """The server invalidated the slot, and WAL that was still needed is lost.

    The message has the server's reason.
    """

    code = "PEN-1204"
    recovery = Recovery.OPERATOR


class PositionGapError(PenstockError):
    """The slot was confirmed beyond the position of its readers: the changes in between are lost."""

    code = "PEN-1205"
    recovery = Recovery.OPERATOR


class SystemChangedError(PenstockError):
    """The server is a different database system than before, or was restored to an earlier state."""

    code = "PEN-1206"
    recovery = Recovery.OPERATOR


class SlotPluginError(SlotForeignError):
    """The slot has another output plugin than pgoutput."""

    code = "PEN-1207"


class SlotDatabaseError(SlotForeignError):
    """The slot belongs to another database of the same server."""

    code = "PEN-1208"


class SlotPhysicalError(SlotForeignError):
    """The slot is a physical replication slot."""

    code = "PEN-1209"


class SlotTemporaryError(SlotForeignError):
    """The slot is temporary: the server drops it when the session that created it ends."""

    code = "PEN-1210"


class SlotTwoPhaseError(SlotForeignError):
    """The slot has two-phase decoding: it sends transactions when they are prepared, before they commit."""

    code = "PEN-1211"


class TimelineChangedError(SystemChangedError):
    """A standby was promoted or the server restored, and the new timeline may not contain all captured
    changes.
    """

    code = "PEN-1212"


class SlotLimitError(PenstockError):
    """The server has no free replication slot (`max_replication_slots`)."""

    code = "PEN-1213"
    recovery = Recovery.OPERATOR


class SenderLimitError(PenstockError):
    """All replication connections of the server are in use (`max_wal_senders`)."""

    code = "PEN-1214"
    recovery = Recovery.RETRY


class StandbyError(SourceError):
    """The server is a standby, which cannot be a source."""

    code = "PEN-1215"


class SlotFailoverError(PenstockError):
    """`failover` is set, but the server cannot synchronise the slot to standbys."""

    code = "PEN-1216"
    recovery = Recovery.OPERATOR


class ChangeTableMissingError(PenstockError):
    """The change table of a trigger capture does not exist, or is being dropped."""

    code = "PEN-1217"
    recovery = Recovery.OPERATOR


class UncheckedTimelineError(PenstockError):
    """The server was promoted, and the reader of the change table has not yet checked whether any delivered
    change was lost.
    """

    code = "PEN-1218"
    recovery = Recovery.RETRY


class SlotUnreservedError(PenstockError):
    """Warning: the slot retains more WAL than the server allows, and may be invalidated at any time.

    It can still be read.
    """

    code = "PEN-1220"
    recovery = Recovery.OPERATOR


class ProtocolError(PenstockError):
    """The server sent data that is not the replication protocol.

    The error names the position and the kind of protocol message, never the payload.
    """

    code = "PEN-1301"
    recovery = Recovery.FATAL


# --- tables -------------------------------------------------------------------------------------------------


class TableError(PenstockError):
    """One table cannot continue; the others do."""

    code = "PEN-1400"
    recovery = Recovery.OPERATOR


class NoTablesError(TableError):
    """The configuration selects no table of the source, or a command names an unknown table."""

    code = "PEN-1401"


class TableWithoutKeyError(TableError):
    """The table's rows cannot be identified: its mode needs a key or REPLICA IDENTITY FULL, and it has
    neither.
    """

    code = "PEN-1402"


class SchemaChangedError(TableError):
    """The columns, key, mode or transform of a table changed in a way that its target cannot follow or
    `schema_changes` does not allow.
    """

    code = "PEN-1403"


class UnsupportedTableError(TableError):
    """The table has names that Spark cannot distinguish, or is of a kind that cannot be captured."""

    code = "PEN-1404"


class ReplicaIdentityError(TableError):
    """Publishing the table would make UPDATE and DELETE of the application fail: it has no primary key and no
    other replica identity.
    """

    code = "PEN-1405"


class TableGapError(TableError):
    """Changes of the table may be missing: it was removed from the publication for a time, or was dropped and
    recreated.
    """

    code = "PEN-1413"


class RowUnidentifiedError(TableError):
    """A change does not contain the key of its row: a partition has another replica identity than its
    root.
    """

    code = "PEN-1417"

    @classmethod
    def of(cls, table: object) -> Self:
        return cls(
            f"a change of {table} does not contain the key, or the whole old row, that identifies its row "
            "in the target",
            hint=f"give every partition of {table} the replica identity of its root (penstock check prints "
            "the statements), "
            f"then penstock tables resync CONFIG {table}",
        )


class PartitionIdentityError(ReplicaIdentityError):
    """A partition has another replica identity than its root, so deletes and key updates could not be applied
    to their rows.
    """

    code = "PEN-1418"


class MembersDifferError(TableError):
    """Tables routed into one target have different columns or keys, or one of them cannot be replicated."""

    code = "PEN-1420"


class UnrepresentableError(TableError):
    """A value is out of the range of its column type, and `types.on_unrepresentable` is `error`."""

    code = "PEN-1411"

    @classmethod
    def of(cls, table: object, column: str) -> Self:
        return cls(
            f"column {column!r} of {table} holds a value that its type cannot hold, and "
            "types.on_unrepresentable is error",
            hint="set types.on_unrepresentable: null, which writes NULL and the exact text to _exact, or "
            "exclude the table",
        )


class UnreadableTextError(TableError):
    """A value cannot be decoded: it is not valid UTF-8 (possible in a SQL_ASCII database), or not in the text
    form of its type (whose definition may have been dropped). With trigger capture also: the columns that the
    table had when a change was recorded are no longer known.
    """

    code = "PEN-1412"

    @classmethod
    def of(cls, table: object, column: str) -> Self:
        return cls(
            f"column {column!r} of {table} has a value that is not valid UTF-8, or not in the text form of "
            "its type",
            hint=f"rewrite the invalid values of {column!r} in UTF-8 and resync the table, or exclude the "
            "table",
        )


class ChangeHeldError(TableError):
    """A change has unchanged TOAST values that the target does not have, because an earlier change of the row
    was rejected.
    """

    code = "PEN-1414"

    @classmethod
    def after_another(cls) -> Self:
        return cls(
            "it does not contain unchanged TOAST values, and the change that set them was rejected",
            hint=_HELD,
        )

    @classmethod
    def under_another_key(cls) -> Self:
        return cls(
            "it does not contain unchanged TOAST values, and the target does not have them under the former "
            "key of the row",
            hint=_HELD,
        )


_HELD = (
    "fix the cause and replay the dead letters of the table, or update all columns of the row in the source"
)


class TransformError(TableError):
    """A transform does not match its table: a column does not exist, a cast is not possible, or the key would
    be lost.
    """

    code = "PEN-1416"


class TableFailedError(TableError):
    """Applying, copying or maintaining the table failed repeatedly for a reason that no other code describes.

    The message contains the reason.
    """

    code = "PEN-1423"


class KeyChangesTooLargeError(TableError):
    """Key changes with unchanged TOAST values connect more changes than one task may hold in memory."""

    code = "PEN-1424"


class RowRefusedError(TableError):
    """A row cannot be transformed or filtered. The message has the reason, never the values."""

    code = "PEN-1415"


# --- spool --------------------------------------------------------------------------------------------------


class SpoolError(PenstockError):
    """The spool cannot be read or written."""

    code = "PEN-2000"
    recovery = Recovery.FATAL


class SpoolLockedError(SpoolError):
    """Another capture is writing to this spool."""

    code = "PEN-2001"
    recovery = Recovery.RETRY


class SpoolCorruptError(SpoolError):
    """A sealed segment does not match its manifest."""

    code = "PEN-2002"
    recovery = Recovery.OPERATOR


class SpoolGapError(SpoolError):
    """The spool no longer contains the changes after the position of a reader."""

    code = "PEN-2003"
    recovery = Recovery.OPERATOR


class SpoolFullError(SpoolError):
    """The volume or the quota of the spool is full. Changes that are not yet sealed remain in the slot."""

    code = "PEN-2005"
    recovery = Recovery.OPERATOR


class ConsumerBusyError(SpoolError):
    """Two queries read a spool under the same consumer name, so that each could release changes that the
    other needs.
    """

    code = "PEN-2006"
    recovery = Recovery.OPERATOR


class SpoolFormatError(SpoolError):
    """The spool or the state at the target was written by an incompatible version of Penstock, or for another
    slot.
    """

    code = "PEN-2004"
    recovery = Recovery.OPERATOR


# --- sinks --------------------------------------------------------------------------------------------------


class SinkError(PenstockError):
    """The target rejected a write; the epoch is retried."""

    code = "PEN-3000"
    recovery = Recovery.RETRY


class TargetForeignError(SinkError):
    """The target already contains a table that this pipeline did not create, or that it cannot adopt."""

    code = "PEN-3001"
    recovery = Recovery.OPERATOR


class TargetRewoundError(SinkError):
    """The target table is behind its recorded position: it was dropped, replaced or restored to an older
    version.
    """

    code = "PEN-3002"
    recovery = Recovery.OPERATOR


class ValuesMissingError(TargetRewoundError):
    """A change has unchanged TOAST values, and the target does not have the row that contains them."""

    code = "PEN-3004"


class SinkRefusedError(SinkError):
    """The target rejected a write for a reason that a retry cannot fix. Only this table fails."""

    code = "PEN-3003"
    recovery = Recovery.OPERATOR


class FileOutsideTableError(SinkRefusedError):
    """The log of a Delta table refers to a file outside the table's directory.

    Penstock neither reads nor deletes it.
    """

    code = "PEN-3008"


class ValuesRefusedError(SinkRefusedError):
    """The target rejected values of a row, because of a constraint on the target table or because the column
    type rejects them.
    """

    code = "PEN-3005"


class TargetFileLostError(SinkError):
    """A file of the target table is missing or damaged.

    Retried a few times, in case the storage was briefly unavailable.
    """

    code = "PEN-3006"


# --- pipeline -----------------------------------------------------------------------------------------------


class PipelineBusyError(PenstockError):
    """Another run of the same pipeline is active."""

    code = "PEN-4001"
    recovery = Recovery.RETRY


class SnapshotLostError(PenstockError):
    """The exported snapshot was lost before all chunks were read.

    The remaining chunks are read under a new snapshot.
    """

    code = "PEN-4002"
    recovery = Recovery.RETRY


class CaptureFailedError(PenstockError):
    """The capture process ended with an error, which the message contains."""

    code = "PEN-4003"
    recovery = Recovery.OPERATOR


class StillDifferentError(PenstockError):
    """Source and target were compared and are not equal."""

    code = "PEN-4004"
    recovery = Recovery.OPERATOR


class CaptureMissingError(PenstockError):
    """The pipeline reads a shared spool, and `penstock capture` is not running."""

    code = "PEN-4010"
    recovery = Recovery.OPERATOR


class TableRewrittenError(SnapshotLostError):
    """A table was rewritten, truncated or altered during its snapshot, so the chunks read so far are not
    consistent.
    """

    code = "PEN-4005"


class SnapshotTaskError(PenstockError):
    """A Spark task that reads a snapshot ended without a reason, e.g. because its process was killed."""

    code = "PEN-4006"
    recovery = Recovery.RETRY


class WorkerStartError(PenstockError):
    """A Python worker process of Spark was killed, or took too long to start (e.g. on a busy machine)."""

    code = "PEN-4007"
    recovery = Recovery.RETRY


class ComparisonFailedError(PenstockError):
    """The comparison of one table ended with an unexpected error, such as Spark running out of memory.

    Other tables are compared.
    """

    code = "PEN-4011"
    recovery = Recovery.OPERATOR


class SlowTableError(PenstockError):
    """Warning: a Delta table has a feature that only Delta's own MERGE can write, which makes each of its
    epochs many times slower.
    """

    code = "PEN-4012"
    recovery = Recovery.OPERATOR


class EpochMissedError(PenstockError):
    """The pipeline did not end an epoch in time at the position at which tables are compared."""

    code = "PEN-4008"
    recovery = Recovery.OPERATOR


# --- connectors ---------------------------------------------------------------------------------------------


class ConnectorError(PenstockError):
    """A source connector cannot perform an operation."""

    code = "PEN-5000"
    recovery = Recovery.OPERATOR


class ConnectorStateError(ConnectorError):
    """A connector method was called in the wrong order: before open, after close, or too late."""

    code = "PEN-5001"
    recovery = Recovery.FATAL


class CheckpointError(ConnectorError):
    """A checkpoint cannot be read, or belongs to another source."""

    code = "PEN-5002"


class RegistryError(ConnectorError):
    """The schema registry does not respond, or its response is invalid."""

    code = "PEN-5010"
    recovery = Recovery.RETRY


class RegistryRefusedError(RegistryError):
    """The schema registry rejected a request: the login is invalid, or the schema cannot be parsed."""

    code = "PEN-5011"
    recovery = Recovery.OPERATOR


class SchemaIncompatibleError(RegistryRefusedError):
    """The table's new schema violates the compatibility rule of its subject in the schema registry."""

    code = "PEN-5012"


# --- records, one at a time ---------------------------------------------------------------------------------


class NoRowsError(PenstockError):
    """There is no further record: the snapshot is complete, or the source is not open."""

    code = "PEN-5101"
    recovery = Recovery.OPERATOR


class SnapshotInterruptedError(PenstockError):
    """A snapshot ended before its last row and cannot continue. Empty the target, and take a new snapshot."""

    code = "PEN-5102"
    recovery = Recovery.OPERATOR


class RecordNotFoundError(PenstockError):
    """There is no record after the position yet."""

    code = "PEN-5103"
    recovery = Recovery.RETRY


class RecordGoneError(RecordNotFoundError):
    """The record after the position is no longer available: it was acknowledged, or the position belongs to
    another source.
    """

    code = "PEN-5104"
    recovery = Recovery.OPERATOR


# --- reference tables ---------------------------------------------------------------------------------------


class ReferenceTableError(ConnectorError):
    """A reference table cannot be read, stored or joined. The message has the reason."""

    code = "PEN-5200"


class ReferenceUnreadableError(ReferenceTableError):
    """The files of a reference table cannot be read at the moment, for example because they are being
    written.
    """

    code = "PEN-5201"
    recovery = Recovery.RETRY


class ReferenceBehindError(ReferenceTableError):
    """The local copy of a reference table did not reach the position of a change in time."""

    code = "PEN-5202"
    recovery = Recovery.RETRY


class ReferencePastError(ReferenceTableError):
    """A change is older than the history that the local copy of a reference table retains."""

    code = "PEN-5203"


class ReferenceStoreError(ReferenceTableError):
    """The directory of a reference table cannot be read, or its content does not match the table."""

    code = "PEN-5204"


class ReferenceBusyError(ReferenceTableError):
    """Another process stores a reference table in the same directory."""

    code = "PEN-5205"
    recovery = Recovery.RETRY
