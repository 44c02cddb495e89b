"""Reaching the source.

Every connection, plain or replication, psycopg or ADBC, is made from one `SourceAddress` with the same pinned session settings, so that a
value is rendered the same way on every road. Errors of the driver become errors of our own tree here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import LiteralString, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from penstock.errors import (
    AuthenticationError,
    ConfigError,
    ConnectionLostError,
    PenstockError,
    PrivilegeError,
    SlotBusyError,
    SourceError,
)
from penstock.secret import Secret

Connection: TypeAlias = psycopg.Connection[tuple[object, ...]]

PINNED_SETTINGS = {
    "TimeZone": "UTC",
    "DateStyle": "ISO,YMD",
    "IntervalStyle": "iso_8601",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "lc_monetary": "C",
    "xmlbinary": "base64",
    "search_path": "pg_catalog",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}

_RETRIED_CLASSES = {"08", "53", "57"}  # connection, resources, operator intervention (shutdown, restart)


_REFUSALS = ("FATAL:", "no password supplied", "root certificate", "certificate verify failed", "does not support SSL")
_PASSING = ("starting up", "shutting down", "recovery mode", "not yet accepting", "too many", "remaining connection slots")


@dataclass(frozen=True, slots=True)
class SourceAddress:
    """How to reach the source database. Holds the password apart from the DSN, so that the rest may be shown."""

    dsn: str
    password: Secret | None = None

    @classmethod
    def parse(cls, dsn: str, password: Secret | None = None) -> SourceAddress:
        """Take a libpq URI or key=value string; a password inside it is taken out of sight."""
        try:
            parameters = conninfo_to_dict(dsn)
        except psycopg.ProgrammingError as error:
            raise ConfigError(
                "the source dsn is not a libpq connection string",
                hint="use the form postgresql://user@host:5432/database?sslmode=require",
            ) from error
        if "sslpassword" in parameters:
            raise ConfigError("the source dsn holds an sslpassword in clear", hint="use a client key without a passphrase, kept unreadable")
        inline = parameters.pop("password", None)
        if password is None and inline is not None:
            password = Secret(str(inline))
        return cls(make_conninfo("", **parameters), password)

    def with_parameters(self, parameters: Mapping[str, str]) -> SourceAddress:
        """The same place, with further libpq parameters."""
        return SourceAddress(make_conninfo(self.dsn, **parameters), self.password)

    def describe(self) -> str:
        """For people: user, host and database, nothing secret."""
        parameters = conninfo_to_dict(self.dsn)
        host = parameters.get("host") or parameters.get("hostaddr") or "local socket"
        port = parameters.get("port") or "5432"
        return f"{parameters.get('user', '')}@{host}:{port}/{parameters.get('dbname', '')}"

    def conninfo(self, application: str, *, replication: bool = False) -> str:
        """The complete connection string, password and pinned settings included. Never log it."""
        parameters = conninfo_to_dict(self.dsn)
        pinned = " ".join(f"-c {name}={value}" for name, value in PINNED_SETTINGS.items())
        own = parameters.get("options")
        extra: dict[str, str | int | None] = {
            "options": f"{own} {pinned}" if own else pinned,
            "client_encoding": "UTF8",
            "application_name": application,
            "connect_timeout": str(parameters.get("connect_timeout") or 10),
            "keepalives_idle": str(parameters.get("keepalives_idle") or 30),
            "keepalives_interval": str(parameters.get("keepalives_interval") or 10),
            "keepalives_count": str(parameters.get("keepalives_count") or 3),
        }
        if self.password is not None:
            extra["password"] = self.password.reveal()
        if replication:
            extra["replication"] = "database"
        return make_conninfo("", **{**parameters, **extra})


@contextmanager
def source_errors(doing: str) -> Iterator[None]:
    """Turn the driver's errors into ours; `doing` says what was being tried."""
    try:
        yield
    except psycopg.Error as error:
        raise translate(error, doing) from error


def translate(error: psycopg.Error, doing: str) -> PenstockError:
    return classify(error.sqlstate or "", " ".join(str(error).split()), doing)


def classify(state: str, text: str, doing: str) -> PenstockError:
    """The one place that reads SQLSTATEs. An empty one means that the server did not answer at all."""
    if not state and any(sign in text for sign in _REFUSALS) and not any(sign in text for sign in _PASSING):
        # A refused connection has no SQLSTATE in libpq; the server's own words are all there is.
        state = "42501" if "permission denied" in text or "replication" in text else "28000"
    if state.startswith("28"):
        return AuthenticationError(
            f"{doing}: {text}", hint="check the role, its password, the database's name, TLS settings and pg_hba.conf"
        )
    if state == "55006":
        return SlotBusyError(f"{doing}: {text}")
    if state == "42501":
        return PrivilegeError(f"{doing}: {text}", hint="grant the role what the message names, such as ALTER ROLE … REPLICATION")
    if not state or state[:2] in _RETRIED_CLASSES:
        return ConnectionLostError(f"{doing}: {text}")
    return SourceError(f"{doing}: {text} (SQLSTATE {state})")


@contextmanager
def connect(address: SourceAddress, application: str = "penstock") -> Iterator[Connection]:
    """A short-lived autocommit connection for catalog work."""
    with source_errors(f"connecting to {address.describe()}"):
        connection = psycopg.connect(address.conninfo(application), autocommit=True)
    with connection, source_errors(f"asking {address.describe()}"):
        yield connection


def connect_replication(address: SourceAddress, application: str = "penstock") -> Connection:
    """A `replication=database` connection. The caller owns it."""
    with source_errors(f"connecting to {address.describe()} for replication"):
        return psycopg.connect(address.conninfo(application, replication=True), autocommit=True)


def replication_command(connection: Connection, command: LiteralString | psycopg.sql.Composed, doing: str) -> list[str]:
    """Run a walsender command such as CREATE_REPLICATION_SLOT and give back its one row as text."""
    text = command if isinstance(command, str) else command.as_string(connection)
    result = connection.pgconn.exec_(text.encode())
    if result.status != psycopg.pq.ExecStatus.TUPLES_OK:
        raise translate(psycopg.errors.error_from_result(result), doing)
    return [(result.get_value(0, column) or b"").decode() for column in range(result.nfields)]


def identify_system(address: SourceAddress) -> str:
    """System identifier and timeline, as one text: the same for as long as positions in the log mean the same."""
    with connect_replication(address) as connection:
        identifier, timeline, *_ = replication_command(connection, "IDENTIFY_SYSTEM", "identifying the server")
        return f"{identifier}/{timeline}"
