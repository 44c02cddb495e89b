"""The whole error tree.

Every error has a stable code, a `Recovery` that says what follows, and, where an operator can mend it, a hint with the exact fix.
A raise site only chooses a class; `penstock.pipeline` and `penstock.capture` decide from `Recovery` alone whether to try again.
Spark hands exceptions over as text, so the code is part of the message. No error ever carries a row value or a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import ClassVar, Self


class Recovery(Enum):
    """What follows an error."""

    RETRY = "retry"
    """Back off and try the same thing again from the same position."""
    OPERATOR = "operator"
    """Stop; a person must act, and the hint says how."""
    FATAL = "fatal"
    """Stop; this should not be possible, and going on could harm data."""


class PenstockError(Exception):
    """The root of everything that Penstock raises on purpose."""

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
    """Find an error of ours in what Spark made of it: its text, somewhere in a traceback. None if there is none."""
    match = re.search(r"(PEN-\d{4}): (.*)(?:\n  fix: (.*))?", text)
    cls = find_error(match[1]) if match else None
    return cls(match[2], hint=match[3]) if match and cls else None


def find_error(code: str) -> type[PenstockError] | None:
    """The class that has this code."""

    def family(cls: type[PenstockError]) -> Iterator[type[PenstockError]]:
        yield cls
        for child in cls.__subclasses__():
            yield from family(child)

    return next((cls for cls in family(PenstockError) if cls.code == code), None)


def _rebuild(cls: type[PenstockError], message: str, hint: str | None) -> PenstockError:
    return cls(message, hint=hint)


# --- configuration -------------------------------------------------------------------------------------------------------


class ConfigError(PenstockError):
    """The configuration file cannot be read, or says something that cannot be done."""

    code = "PEN-1001"
    recovery = Recovery.OPERATOR


class SecretError(PenstockError):
    """A secret is given by reference, and the reference leads nowhere."""

    code = "PEN-1002"
    recovery = Recovery.OPERATOR


class EnvironmentUnfitError(PenstockError):
    """The machine lacks something that Penstock needs: Java, a package, a directory it may write to."""

    code = "PEN-1003"
    recovery = Recovery.OPERATOR


class NoTableError(ConfigError):
    """No table is named that records could be read from."""

    code = "PEN-1011"


class InvalidUrlError(ConfigError):
    """The address of the source is not one, or the database does not answer under it."""

    code = "PEN-1012"


# --- the source: connection and server ------------------------------------------------------------------------------------


class SourceError(PenstockError):
    """The Postgres side refused something that no other class names."""

    code = "PEN-1100"
    recovery = Recovery.OPERATOR


class ConnectionLostError(PenstockError):
    """The server cannot be reached, or went away."""

    code = "PEN-1101"
    recovery = Recovery.RETRY


class AuthenticationError(PenstockError):
    """The server refused the role, its password or its certificate."""

    code = "PEN-1102"
    recovery = Recovery.OPERATOR


class WalLevelError(PenstockError):
    """The server does not write a logical WAL."""

    code = "PEN-1103"
    recovery = Recovery.OPERATOR


class PrivilegeError(PenstockError):
    """The role may not do what capture needs."""

    code = "PEN-1104"
    recovery = Recovery.OPERATOR


class PublicationError(PenstockError):
    """The publication is missing, or leaves out changes, columns or rows that a mirror needs."""

    code = "PEN-1105"
    recovery = Recovery.OPERATOR


class ServerUnfitError(PenstockError):
    """The server cannot be captured as it is: too old, read-only to the role, or behind a pooler that does not pass replication on."""

    code = "PEN-1106"
    recovery = Recovery.OPERATOR


class UntrustedObjectError(PrivilegeError):
    """A schema, table, function or publication that Penstock needs was made by a role that is not trusted, or has another definition."""

    code = "PEN-1108"


class LockWaitError(PenstockError):
    """Another session holds a lock that a change of the publication needs."""

    code = "PEN-1107"
    recovery = Recovery.RETRY


# --- the source: slot and position -------------------------------------------------------------------------------------------


class SlotMissingError(PenstockError):
    """Tables have been filled from a slot that no longer exists: changes since then are lost."""

    code = "PEN-1201"
    recovery = Recovery.OPERATOR


class SlotBusyError(PenstockError):
    """Another process is reading the slot."""

    code = "PEN-1202"
    recovery = Recovery.RETRY


class SlotForeignError(PenstockError):
    """The slot exists, but is not one that can be read here; the classes below say why."""

    code = "PEN-1203"
    recovery = Recovery.OPERATOR


class SlotLostError(PenstockError):
    """The server invalidated the slot, and the message names its reason: what was still needed is gone."""

    code = "PEN-1204"
    recovery = Recovery.OPERATOR


class PositionGapError(PenstockError):
    """The slot has moved past what its readers have: changes in between cannot be had any more."""

    code = "PEN-1205"
    recovery = Recovery.OPERATOR


class SystemChangedError(PenstockError):
    """The server is another database system than the one captured before, or was set back to an earlier time."""

    code = "PEN-1206"
    recovery = Recovery.OPERATOR


class SlotPluginError(SlotForeignError):
    """The slot belongs to another output plugin than pgoutput."""

    code = "PEN-1207"


class SlotDatabaseError(SlotForeignError):
    """The slot belongs to another database of the same server."""

    code = "PEN-1208"


class SlotPhysicalError(SlotForeignError):
    """The slot is a physical one, such as a standby uses."""

    code = "PEN-1209"


class SlotTemporaryError(SlotForeignError):
    """The slot is temporary: it belongs to somebody's session and ends with it."""

    code = "PEN-1210"


class SlotTwoPhaseError(SlotForeignError):
    """The slot decodes transactions when they are prepared, before it is certain that they commit."""

    code = "PEN-1211"


class TimelineChangedError(SystemChangedError):
    """A standby was promoted, or the server restored, and it is not certain that the log goes on where the capture stands."""

    code = "PEN-1212"


class SlotLimitError(PenstockError):
    """The server has no room for another replication slot."""

    code = "PEN-1213"
    recovery = Recovery.OPERATOR


class SenderLimitError(PenstockError):
    """All of the server's connections for replication are taken."""

    code = "PEN-1214"
    recovery = Recovery.RETRY


class StandbyError(SourceError):
    """The server is a standby, and cannot be captured from."""

    code = "PEN-1215"


class SlotFailoverError(PenstockError):
    """The server cannot keep the slot alive on its standbys, as was asked for."""

    code = "PEN-1216"
    recovery = Recovery.OPERATOR


class ChangeTableMissingError(PenstockError):
    """A capture by triggers has no change table to read, or what it needs of it is gone."""

    code = "PEN-1217"
    recovery = Recovery.OPERATOR


class UncheckedTimelineError(PenstockError):
    """The server was promoted, and the reader of its change table has not seen yet whether it has all that was given out."""

    code = "PEN-1218"
    recovery = Recovery.RETRY


class SlotUnreservedError(PenstockError):
    """The slot holds back more WAL than the server allows, and may be invalidated any moment. A warning: it can still be read."""

    code = "PEN-1220"
    recovery = Recovery.OPERATOR


class ProtocolError(PenstockError):
    """Bytes that are not the replication protocol. Says where and what kind of message, never the payload."""

    code = "PEN-1301"
    recovery = Recovery.FATAL


# --- tables ------------------------------------------------------------------------------------------------------------------


class TableError(PenstockError):
    """One table cannot go on; the others do."""

    code = "PEN-1400"
    recovery = Recovery.OPERATOR


class NoTablesError(TableError):
    """The configuration matches no table of the source."""

    code = "PEN-1401"


class TableWithoutKeyError(TableError):
    """Nothing tells the table's rows apart: it has no key, and its mode needs one, or whole old rows (REPLICA IDENTITY FULL)."""

    code = "PEN-1402"


class SchemaChangedError(TableError):
    """The source table changed its shape in a way that the target cannot follow."""

    code = "PEN-1403"


class UnsupportedTableError(TableError):
    """The table has names that Spark cannot tell apart, or is of a kind that cannot be captured."""

    code = "PEN-1404"


class ReplicaIdentityError(TableError):
    """Publishing the table would make the application's own UPDATE and DELETE fail: it has neither a primary key nor another identity."""

    code = "PEN-1405"


class TableGapError(TableError):
    """Changes of the table may be missing: it left the publication for a while, or is not the table that it was."""

    code = "PEN-1413"


class RowUnidentifiedError(TableError):
    """A change does not carry the key of its row: a partition logs its changes by another replica identity than its root has."""

    code = "PEN-1417"

    @classmethod
    def of(cls, table: object) -> Self:
        return cls(
            f"a change of {table} does not carry the key, or the whole old row, that identifies its row in the target",
            hint=f"give every partition of {table} the replica identity of its root (penstock check prints the statements), "
            f"then penstock tables resync {table}",
        )


class PartitionIdentityError(ReplicaIdentityError):
    """A partition logs old keys by another replica identity than its root announces, so deletes and key updates would miss their row."""

    code = "PEN-1418"


class MembersDifferError(TableError):
    """Tables that are routed into one have not the same columns and key, or one of them cannot be mirrored."""

    code = "PEN-1420"


class UnrepresentableError(TableError):
    """A value is beyond the type of its column, and the pipeline is told not to go on with null and `_exact` in its place."""

    code = "PEN-1411"

    @classmethod
    def of(cls, table: object, column: str) -> Self:
        return cls(
            f"column {column!r} of {table} holds a value that its type cannot hold, and types.on_unrepresentable is error",
            hint="set types.on_unrepresentable to null, which keeps such values in _exact, or exclude the table",
        )


class UnreadableTextError(TableError):
    """A text cannot be read. It is not valid UTF-8, since a SQL_ASCII database stores whatever bytes it is given; or it is not written as
    its type is, which may be gone from the catalog; or the columns of a change that triggers recorded are no longer known."""

    code = "PEN-1412"

    @classmethod
    def of(cls, table: object, column: str) -> Self:
        return cls(
            f"column {column!r} of {table} holds a text that is not UTF-8, or is not written as its type is",
            hint=f"rewrite such values of {column!r} in UTF-8, if there are any, and resync the table, or exclude it",
        )


class ChangeHeldError(TableError):
    """A change leaves values as they were, and they came with a change that was refused: the target does not have them."""

    code = "PEN-1414"

    @classmethod
    def after_another(cls) -> Self:
        return cls("it leaves values unchanged that came with a change that was refused", hint=_HELD)

    @classmethod
    def under_another_key(cls) -> Self:
        return cls("it leaves values unchanged that the row had under its former key, where the target did not have them", hint=_HELD)


_HELD = "replay the letters of the table once they can be applied, or write the whole row anew in the source"


class TransformError(TableError):
    """A transform does not fit its table: a column is not there, its type cannot become what is asked for, or the key would be lost."""

    code = "PEN-1416"


class TableFailedError(TableError):
    """Applying, copying or maintaining the table kept failing for a reason that no other class names; the message has its kind."""

    code = "PEN-1423"


class RowRefusedError(TableError):
    """Rows cannot be transformed, and the pipeline is told to stop their table; the message says why, and never which values."""

    code = "PEN-1415"


# --- spool ---------------------------------------------------------------------------------------------------------------------


class SpoolError(PenstockError):
    """The spool cannot be read or written."""

    code = "PEN-2000"
    recovery = Recovery.FATAL


class SpoolLockedError(SpoolError):
    """Another capture writes to this spool."""

    code = "PEN-2001"
    recovery = Recovery.RETRY


class SpoolCorruptError(SpoolError):
    """A sealed segment is not what its manifest says."""

    code = "PEN-2002"
    recovery = Recovery.OPERATOR


class SpoolGapError(SpoolError):
    """The spool does not reach back to the position that a reader needs."""

    code = "PEN-2003"
    recovery = Recovery.OPERATOR


class SpoolFullError(SpoolError):
    """The disk, or the quota, of the spool is full. What is not sealed yet stays in the slot."""

    code = "PEN-2005"
    recovery = Recovery.OPERATOR


class ConsumerBusyError(SpoolError):
    """Two queries read a spool under one name, so that each would let go of what the other still needs."""

    code = "PEN-2006"
    recovery = Recovery.OPERATOR


class SpoolFormatError(SpoolError):
    """The spool, or what is kept beside the tables, was written by a version of Penstock that this one cannot read; or for another slot."""

    code = "PEN-2004"
    recovery = Recovery.OPERATOR


# --- sinks ---------------------------------------------------------------------------------------------------------------------


class SinkError(PenstockError):
    """The target refused a write; the epoch is tried again."""

    code = "PEN-3000"
    recovery = Recovery.RETRY


class TargetForeignError(SinkError):
    """Something that this pipeline did not write stands where its table should go."""

    code = "PEN-3001"
    recovery = Recovery.OPERATOR


class TargetRewoundError(SinkError):
    """The target table holds less than was recorded: it was dropped, replaced or restored to an older version."""

    code = "PEN-3002"
    recovery = Recovery.OPERATOR


class ValuesMissingError(TargetRewoundError):
    """A change leaves values as they were, and the target does not have the row that has them."""

    code = "PEN-3004"


class SinkRefusedError(SinkError):
    """The target refused a write for a reason that trying again will not mend; only this table stops."""

    code = "PEN-3003"
    recovery = Recovery.OPERATOR


class FileOutsideTableError(SinkRefusedError):
    """The log of a Delta table names a file outside of the table's directory, which is neither read nor removed."""

    code = "PEN-3008"


class ValuesRefusedError(SinkRefusedError):
    """The target refused values of a row: by a constraint that somebody put there, or because its type does not read them."""

    code = "PEN-3005"


class TargetFileLostError(SinkError):
    """A file of the target table is missing or damaged. Tried again a few times, in case its storage was away for a moment."""

    code = "PEN-3006"


# --- pipeline --------------------------------------------------------------------------------------------------------------------


class PipelineBusyError(PenstockError):
    """Another run of the same pipeline is still alive."""

    code = "PEN-4001"
    recovery = Recovery.RETRY


class SnapshotLostError(PenstockError):
    """The exported snapshot went away while chunks were still to be read; the rest is read under a new one."""

    code = "PEN-4002"
    recovery = Recovery.RETRY


class CaptureFailedError(PenstockError):
    """The capture process ended with an error of its own; the message says which."""

    code = "PEN-4003"
    recovery = Recovery.OPERATOR


class StillDifferentError(PenstockError):
    """Source and target were compared and are not equal."""

    code = "PEN-4004"
    recovery = Recovery.OPERATOR


class CaptureMissingError(PenstockError):
    """The pipeline reads a spool into which nobody captures: the process that should is not running."""

    code = "PEN-4010"
    recovery = Recovery.OPERATOR


class TableRewrittenError(SnapshotLostError):
    """A table was rewritten, emptied or altered while it was being copied: what was read of it does not belong together any more."""

    code = "PEN-4005"


class SnapshotTaskError(PenstockError):
    """A task of Spark's that reads for a snapshot ended without saying why, as one does whose process is killed."""

    code = "PEN-4006"
    recovery = Recovery.RETRY


class WorkerStartError(PenstockError):
    """A Python process of Spark's was killed, or took too long to start, as happens on a machine that is overloaded."""

    code = "PEN-4007"
    recovery = Recovery.RETRY


class ComparisonFailedError(PenstockError):
    """Something unexpected ended the comparison of one table, such as Spark running out of memory; the other tables are compared."""

    code = "PEN-4011"
    recovery = Recovery.OPERATOR


class SlowTableError(PenstockError):
    """A warning: a table has something that only Spark's own MERGE can write, and each of its epochs takes many times longer."""

    code = "PEN-4012"
    recovery = Recovery.OPERATOR


class EpochMissedError(PenstockError):
    """The pipeline did not end an epoch at the position at which source and target were to be compared."""

    code = "PEN-4008"
    recovery = Recovery.OPERATOR


# --- connectors ------------------------------------------------------------------------------------------------------------------


class ConnectorError(PenstockError):
    """A source connector cannot do what it is asked for."""

    code = "PEN-5000"
    recovery = Recovery.OPERATOR


class ConnectorStateError(ConnectorError):
    """A call to a connector came out of turn: before it was opened, after it was closed, or too late."""

    code = "PEN-5001"
    recovery = Recovery.FATAL


class CheckpointError(ConnectorError):
    """A checkpoint cannot be read, or is of another source."""

    code = "PEN-5002"


class RegistryError(ConnectorError):
    """The schema registry does not answer, or not in a way that can be understood."""

    code = "PEN-5010"
    recovery = Recovery.RETRY


class RegistryRefusedError(RegistryError):
    """The schema registry refuses what it was asked for: it does not know the caller, or cannot read the schema."""

    code = "PEN-5011"
    recovery = Recovery.OPERATOR


class SchemaIncompatibleError(RegistryRefusedError):
    """The rule of a subject in the schema registry does not let the table's new shape follow the former ones."""

    code = "PEN-5012"


# --- records, one at a time --------------------------------------------------------------------------------------------------------


class NoRowsError(PenstockError):
    """There is no record to give: the snapshot is at its end, or what was read from is closed."""

    code = "PEN-5101"
    recovery = Recovery.OPERATOR


class SnapshotInterruptedError(PenstockError):
    """A snapshot was ended before its last row; started again, it begins anew."""

    code = "PEN-5102"
    recovery = Recovery.RETRY


class RecordNotFoundError(PenstockError):
    """There is no record after the position yet."""

    code = "PEN-5103"
    recovery = Recovery.RETRY


class RecordGoneError(RecordNotFoundError):
    """The record after the position will never come: it was acknowledged before, or the position is not of this source."""

    code = "PEN-5104"
    recovery = Recovery.OPERATOR


# --- reference tables ------------------------------------------------------------------------------------------------------------


class ReferenceTableError(ConnectorError):
    """A reference table cannot be followed, kept or joined with as asked; the message says why."""

    code = "PEN-5200"


class ReferenceUnreadableError(ReferenceTableError):
    """The files of a reference table cannot be read just now: somebody may be writing them."""

    code = "PEN-5201"
    recovery = Recovery.RETRY


class ReferenceBehindError(ReferenceTableError):
    """The kept copy of a reference table did not come to the position of a change in time."""

    code = "PEN-5202"
    recovery = Recovery.RETRY


class ReferencePastError(ReferenceTableError):
    """A change is older than all that the kept copy of a reference table remembers."""

    code = "PEN-5203"


class ReferenceStoreError(ReferenceTableError):
    """The directory in which a reference table is kept holds another table, or cannot be read."""

    code = "PEN-5204"


class ReferenceBusyError(ReferenceTableError):
    """Another process keeps a reference table in the same directory."""

    code = "PEN-5205"
    recovery = Recovery.RETRY
