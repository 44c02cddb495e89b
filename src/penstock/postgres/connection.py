"""Connections to Postgres, and the translation of psycopg's errors.

Every connection, plain or replication, is opened from a `SourceAddress` with the same pinned session
settings, so that the server always prints a value in the same format. `classify` maps a SQLSTATE to an error
class; `target.state` adds rules for errors of a target.
"""

from __future__ import annotations

import re
import select
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import LiteralString, TypeAlias

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import ExecStatus, PGconn, Ping

from penstock.errors import (
    AuthenticationError,
    ConfigError,
    ConnectionLostError,
    LockWaitError,
    PenstockError,
    PrivilegeError,
    SenderLimitError,
    ServerUnfitError,
    SlotBusyError,
    SlotLimitError,
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
    "row_security": "off",  # a role with restricting policies gets an error instead of part of the table
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "default_transaction_isolation": r"read\ committed",  # a statement after a lock must see earlier commits
}

MINIMUM_VERSION = 140_000
"""The first version with TID range scans: an older server reads the whole table for each chunk of a snapshot.
"""

TRUSTED_ROLES = "trusted_roles"
"""The configuration key that lists roles whose objects may be used (`penstock.postgres.ownership`)."""
_TRUST_SETTING = f"penstock.{TRUSTED_ROLES}"

# Settings by the first server version that has them. They are set after connecting, since an older server
# would refuse a connection that requests them.
_NEWER_SETTINGS = {140_000: b"SET idle_session_timeout = 0", 170_000: b"SET transaction_timeout = 0"}

_RETRIED_CLASSES = {
    "08",
    "40",
    "53",
    "57",
}  # connection, rollback (deadlock), resources, operator intervention (shutdown, restart)

_OF_NAMES = frozenset({"08", "0A", "25", "28", "2B", "3D", "3F", "40", "42", "53", "54", "55", "57", "58"})
"""SQLSTATE classes whose messages contain names and settings, but no row values."""

_OF_FILES = frozenset({"XX001", "XX002"})  # a damaged table or index
_RAISE = "exec_stmt_raise"  # the source of RAISE in PL/pgSQL: its message may quote a row, with any SQLSTATE

# libpq reports no SQLSTATE for a refused connection, and the server's message may be in any language. But
# libpq puts a severity before the message, which identifies a refusal.
_OWN_REFUSAL = re.compile(
    r"no password supplied|certificate|private key file|does not support SSL|unsupported startup parameter"
)
"""Messages of libpq itself, or of a pooler. After one of these messages, a ping gives no information."""
_REFUSAL = re.compile(rf"failed: (?:\S+: |[^:]{{1,40}}:  )|FATAL:|{_OWN_REFUSAL.pattern}")
_PASSING = (
    "starting up",
    "shutting down",
    "recovery mode",
    "not yet accepting",
    "too many",
    "remaining connection slots",
)
_DENIED = re.compile(
    r"permission denied|replication role|\bREPLICATION\b"
)  # the attribute's name is the same in every language
_QUOTED = re.compile('"[^"]*"|«[^»]*»|»[^«]*«|„[^“”]*[“”]|“[^”]*”')
_SECRET_PARAMETERS = {
    "sslpassword": "use a client key without a passphrase, in a file that other users cannot read",
    "oauth_client_secret": "use a password or a client certificate: an unattended process cannot go "
    "through an OAuth device flow",
    "scram_client_key": "give the role's password by reference, under password:",
    "scram_server_key": "give the role's password by reference, under password:",
}
"""Secret parameters of libpq other than the password. A DSN is part of Spark's options, which appear in query
plans.
"""

_WAIT_SECONDS = 1.0
_CANCEL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class SourceAddress:
    """Address of a Postgres database. The DSN contains no password, so that it may be shown."""

    dsn: str
    password: Secret | None = None

    @classmethod
    def parse(cls, dsn: str, password: Secret | None = None) -> SourceAddress:
        """Parse a libpq URI or key=value string. A password in it is moved to `password`."""
        try:
            parameters = conninfo_to_dict(dsn)
        except psycopg.ProgrammingError:
            raise ConfigError(
                "the source dsn is not a libpq connection string",
                hint="use the form postgresql://user@host:5432/database?sslmode=verify-full",
            ) from None  # libpq quotes the part of the string that it cannot parse
        for name in _SECRET_PARAMETERS.keys() & parameters.keys():
            raise ConfigError(
                f"the source dsn contains the secret {name} in clear text", hint=_SECRET_PARAMETERS[name]
            )
        inline = parameters.pop("password", None)
        if password is None and inline is not None:
            password = Secret(str(inline))
        return cls(make_conninfo("", **parameters), password)

    def with_parameters(self, parameters: Mapping[str, str]) -> SourceAddress:
        """Return the same address with further libpq parameters."""
        return SourceAddress(make_conninfo(self.dsn, **parameters), self.password)

    def trusting(self, roles: Collection[str]) -> SourceAddress:
        """Return the same address for sessions that trust objects of these roles
        (`penstock.postgres.ownership`). The DSN passes the roles as a session setting.
        """
        if not roles:
            return self
        escaped = re.sub(r"([\\\s])", r"\\\1", ",".join(roles))
        own = conninfo_to_dict(self.dsn).get("options")
        setting = f"-c {_TRUST_SETTING}={escaped}"
        return self.with_parameters({"options": f"{own} {setting}" if own else setting})

    def describe(self) -> str:
        """Return user, host and database for messages, without secrets."""
        parameters = conninfo_to_dict(self.dsn)
        host = parameters.get("host") or parameters.get("hostaddr") or "local socket"
        port = parameters.get("port") or "5432"
        return f"{parameters.get('user', '')}@{host}:{port}/{parameters.get('dbname', '')}"

    def conninfo(self, application: str, *, replication: bool = False) -> str:
        """Return the complete connection string, with password and pinned settings. Never log it."""
        parameters = conninfo_to_dict(self.dsn)
        pinned = " ".join(f"-c {name}={value}" for name, value in PINNED_SETTINGS.items())
        own = parameters.get("options")
        # The setting is always given, since the owner of a database could define a default for it.
        untrusted = f"-c {_TRUST_SETTING}="
        extra: dict[str, str | int | None] = {
            "options": f"{untrusted} {own} {pinned}" if own else f"{untrusted} {pinned}",
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
    """Translate the driver's errors; `doing` names the action for the message."""
    try:
        yield
    except psycopg.Error as error:
        raise translate(
            error, doing
        ) from None  # the chained traceback would show the server's detail and context


def translate(error: psycopg.Error, doing: str) -> PenstockError:
    return classify(error.sqlstate or "", safe_message(error), doing)


def is_about_names(error: psycopg.Error) -> bool:
    """Whether the message can contain only names and settings. Other messages may quote row values."""
    state = error.sqlstate or ""
    return (state[:2] in _OF_NAMES or state in _OF_FILES) and error.diag.source_function != _RAISE


def safe_message(error: psycopg.Error) -> str:
    """Return the error's message, or the name of its class if the message may contain row values. Detail and
    context are always omitted: the detail of a violated constraint contains the key, and the context of a
    COPY contains the row.
    """
    if not error.sqlstate:  # an error of the driver or of libpq
        return str(error)
    return (error.diag.message_primary if is_about_names(error) else None) or type(error).__name__


def classify(state: str, words: str, doing: str) -> PenstockError:
    """Map a SQLSTATE and its message to an error. An empty SQLSTATE means that the server did not answer, or
    refused the connection.
    """
    text = " ".join(words.split())
    if "unsupported startup parameter" in text:
        hint = (
            "the address is that of a connection pooler such as PgBouncer: point source.dsn at the "
            "server itself"
        )
        return ServerUnfitError(f"{doing}: {text}", hint=hint)
    if not state:
        state = _refusal_state(words)
    if state.startswith("28"):
        return AuthenticationError(
            f"{doing}: {text}",
            hint="check the role, its password, the database's name, TLS settings and pg_hba.conf",
        )
    if state == "55006":
        return SlotBusyError(f"{doing}: {text}")
    if state == "55P03":
        return LockWaitError(f"{doing}: {text}")
    if state == "42501" and "row-level security" in text:
        return PrivilegeError(
            f"{doing}: {text}", hint="row-level policies hide rows from the role: ALTER ROLE … BYPASSRLS"
        )
    if state == "42501":
        return PrivilegeError(
            f"{doing}: {text}",
            hint="grant the role the privilege in the message, for example ALTER ROLE … REPLICATION",
        )
    if not state or state[:2] in _RETRIED_CLASSES:
        return ConnectionLostError(f"{doing}: {text}")
    return SourceError(f"{doing}: {text} (SQLSTATE {state})")


def _refusal_state(words: str) -> str:
    """Return the SQLSTATE of a refused connection, derived from the message because libpq does not report it.
    Empty if the connection was not refused, or was refused for a temporary reason.
    """
    if not _REFUSAL.search(words) or any(sign in words for sign in _PASSING):
        return ""
    return (
        "42501" if _DENIED.search(_QUOTED.sub("", words)) else "28000"
    )  # users choose the quoted names, such as that of a role


@contextmanager
def connect(address: SourceAddress, application: str = "penstock") -> Iterator[Connection]:
    """Context manager for an autocommit connection. Translates psycopg's errors in the block."""
    connection = _connect(address.conninfo(application), f"connecting to {address.describe()}")
    with connection, source_errors(f"querying {address.describe()}"):
        yield connection


def refuse_views(connection: Connection) -> None:
    """Make the server reject queries on views and foreign tables for the rest of the session. Called before a
    session reads rows by table name: if the owner replaces the table with a view, the view's functions would
    run with this role's rights. Does nothing on servers older than the minor releases of August 2024, which
    lack the setting. Must not be called within a transaction.
    """
    connection.pgconn.exec_(
        b"SELECT pg_catalog.set_config(name, 'view, foreign-table', false) FROM pg_catalog.pg_settings "
        b"WHERE name = 'restrict_nonsystem_relation_kind'"
    )


def tls_weakness(connection: Connection) -> str | None:
    """Return the reason why TLS does not verify the server's identity; None if it does, or if the connection
    is local.
    """
    address = connection.info.hostaddr
    mode = next(
        (option.val or b"" for option in connection.pgconn.info if option.keyword == b"sslmode"), b""
    ).decode()
    if not address or ip_address(address.partition("%")[0]).is_loopback or mode == "verify-full":
        return None
    return f"sslmode is {mode or 'prefer'}, which does not prove the identity of {connection.info.host}"


def connect_replication(address: SourceAddress, application: str = "penstock") -> Connection:
    """Open a `replication=database` connection, which the caller must close."""
    doing = f"connecting to {address.describe()} for replication"
    try:
        connection = _connect(address.conninfo(application, replication=True), doing)
    except (ConnectionLostError, AuthenticationError, PrivilegeError) as error:
        if "max_wal_senders" not in error.message:  # the setting's name is the same in every language
            raise
        raise SenderLimitError(
            error.message,
            hint="end a reader that is no longer needed (SELECT pid, application_name "
            "FROM pg_stat_replication), "
            "or raise the limit with ALTER SYSTEM SET max_wal_senders = … and restart the server",
        ) from error
    disable_conversion(connection)
    return connection


def disable_conversion(connection: Connection) -> None:
    """Receive texts without encoding conversion from a SQL_ASCII database, which may contain any bytes. If
    the server validated texts as UTF-8, one invalid text would end the stream for all tables. Without
    validation, the decoder determines the table that contains the text.
    """
    if connection.info.parameter_status("server_encoding") == "SQL_ASCII":
        connection.pgconn.exec_(b"SET client_encoding = 'SQL_ASCII'")


@contextmanager
def conversion_disabled(connection: Connection) -> Iterator[None]:
    """Context manager for `disable_conversion`. Enables the conversion again after the block, for later
    queries that return text to psycopg.
    """
    disable_conversion(connection)
    yield
    if connection.info.parameter_status("server_encoding") == "SQL_ASCII":
        connection.pgconn.exec_(b"SET client_encoding = 'UTF8'")


def _connect(conninfo: str, doing: str) -> Connection:
    try:
        connection = psycopg.connect(conninfo, autocommit=True)
    except psycopg.Error as error:
        raise _refused(conninfo, _unconnected(conninfo, translate(error, doing)), doing) from error
    too_old = version_fault(connection.info.server_version, doing)
    if too_old is not None:
        connection.close()
        raise too_old
    for version, setting in _NEWER_SETTINGS.items():
        if connection.info.server_version >= version:
            connection.pgconn.exec_(setting)
    return connection


def version_fault(version: int, doing: str) -> ServerUnfitError | None:
    """Return the error for a server below `MINIMUM_VERSION`; None for any other server."""
    if version >= MINIMUM_VERSION:
        return None
    major, minor = divmod(version, 10_000)
    return ServerUnfitError(
        f"{doing}: the server is Postgres {major}.{minor}, and Penstock needs {MINIMUM_VERSION // 10_000} "
        "or newer",
        hint="upgrade the server",
    )


def _unconnected(conninfo: str, error: PenstockError) -> PenstockError:
    """Return the error; if the role lacks the CONNECT privilege, with the GRANT statement as hint."""
    if not isinstance(error, PrivilegeError) or "CONNECT" not in _QUOTED.sub("", error.message):
        return error
    parameters = conninfo_to_dict(conninfo)
    role = str(parameters.get("user") or "")
    names = (sql.Identifier(str(parameters.get("dbname") or role)), sql.Identifier(role))
    return PrivilegeError(
        error.message, hint=sql.SQL("GRANT CONNECT ON DATABASE {} TO {};").format(*names).as_string(None)
    )


def _refused(conninfo: str, error: PenstockError, doing: str) -> PenstockError:
    """Return a `ConnectionLostError` if the server is starting or stopping, and so refuses all connections;
    otherwise `error`. The message depends on the server's language, so a ping decides.
    """
    if isinstance(error, ConnectionLostError) or _OWN_REFUSAL.search(error.message):
        return error
    # Two seconds are the shortest timeout of libpq. The call blocks the whole process.
    ping = make_conninfo(conninfo, connect_timeout=2)
    if PGconn.ping(ping.encode()) == Ping.OK:
        return error
    return ConnectionLostError(f"{doing}: the server does not accept connections at the moment")


def replication_command(
    connection: Connection,
    command: LiteralString | psycopg.sql.Composed,
    doing: str,
    *,
    on_wait: Callable[[], None] | None = None,
) -> list[str]:
    """Run a walsender command such as CREATE_REPLICATION_SLOT and return its row, if any, as text. While it
    runs, `on_wait` is called once a second; an exception from it cancels the command.
    """
    text = command if isinstance(command, str) else command.as_string(connection)
    with source_errors(doing):
        result = _execute(connection, text.encode(), on_wait)
    if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
        raise _command_error(psycopg.errors.error_from_result(result), doing)
    return [(result.get_value(0, column) or b"").decode() for column in range(result.nfields)]


def _execute(
    connection: Connection, command: bytes, on_wait: Callable[[], None] | None
) -> psycopg.pq.abc.PGresult:
    pgconn = connection.pgconn
    if on_wait is None:
        return pgconn.exec_(command)
    pgconn.send_query(command)
    try:
        while pgconn.is_busy():
            if select.select([pgconn.socket], [], [], _WAIT_SECONDS)[0]:
                pgconn.consume_input()
            else:
                on_wait()
    except BaseException:
        with suppress(psycopg.Error):
            # Without the cancel, the server would finish the command and leave a slot. Unlike `cancel`,
            # `cancel_safe` uses the connection's TLS.
            connection.cancel_safe(timeout=_CANCEL_SECONDS)
        _await_end(connection)
        raise
    result = pgconn.get_result()
    while pgconn.get_result() is not None:
        pass
    assert result is not None
    return result


def _await_end(connection: Connection) -> None:
    """Read the result of a cancelled command, so that the connection can be closed cleanly. If the server
    sends none in time, close the connection.
    """
    pgconn = connection.pgconn
    while pgconn.is_busy():
        if not select.select([pgconn.socket], [], [], _CANCEL_SECONDS)[0]:
            connection.close()
            return
        pgconn.consume_input()
    while pgconn.get_result() is not None:
        pass


def _command_error(error: psycopg.Error, doing: str) -> PenstockError:
    if error.sqlstate == "53400":
        return SlotLimitError(
            f"{doing}: {safe_message(error)}",
            hint="drop a slot that is not needed (SELECT slot_name, active, restart_lsn "
            "FROM pg_replication_slots; "
            "SELECT pg_drop_replication_slot('…')), or raise the limit with "
            "ALTER SYSTEM SET max_replication_slots = … and restart the server",
        )
    return translate(error, doing)
