"""Log lines of the command line, and none from the library."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.main import app
from penstock.errors import ConfigError
from penstock.logs import (
    LogFormat,
    LogLevel,
    StderrHandler,
    configure_from_environment,
    configure_logging,
    is_json,
    worker_environment,
)
from penstock.pipeline.observer import PipelineObserver
from penstock.pipeline.table_states import TableStatus
from penstock.postgres.connection import SourceAddress
from penstock.schema import TableName
from penstock.secret import Secret

NEEDLE = "n33dle-in-the-hay"
_log = logging.getLogger("penstock.capture.example")


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PENSTOCK_LOG_LEVEL", "PENSTOCK_LOG_FORMAT"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever is configured
        monkeypatch.delenv(name)
    yield
    logger = logging.getLogger("penstock")
    logger.setLevel(logging.NOTSET)
    for handler in [each for each in logger.handlers if isinstance(each, StderrHandler)]:
        logger.removeHandler(handler)


def test_a_text_line_has_the_message_and_its_facts(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogLevel.WARNING, LogFormat.TEXT)
    _log.warning(
        "capture interrupted",
        extra={"code": "PEN-1101", "reason": "it is gone", "pause_seconds": 0.5, "tables": ["a", "b"]},
    )
    _log.info("not shown")
    line = capsys.readouterr().err
    assert line[19:] == (
        ' WARNING capture interrupted  code=PEN-1101 reason="it is gone" pause_seconds=0.5 tables=["a", '
        '"b"]\n'
    )


def test_a_json_line_is_one_object_with_time_level_logger_message_and_facts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(LogLevel.INFO, LogFormat.JSON)
    facts = {
        "table": TableName("public", "Ärger\u2028"),
        "rows": 7,
        "rate": math.inf,
        "kept": {TableName("public", "a"): "busy"},
        "fix": None,
    }
    _log.info("chunk read", extra=facts)
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert list(found) == ["time", "level", "logger", "message", "facts"]
    assert (found["level"], found["logger"], found["message"]) == (
        "info",
        "penstock.capture.example",
        "chunk read",
    )
    assert found["facts"] == {
        "table": str(facts["table"]),
        "rows": 7,
        "rate": "inf",
        "kept": {"public.a": "busy"},
        "fix": None,
    }
    assert found["time"].endswith("+00:00")


@pytest.mark.parametrize("form", LogFormat)
def test_a_fact_cannot_forge_a_line_or_control_a_terminal(
    capsys: pytest.CaptureFixture[str], form: LogFormat
) -> None:
    configure_logging(LogLevel.WARNING, form)
    _log.warning(
        "table failed",
        extra={"table": 'public."a\nERROR forged"', "slot": "a\nERROR", "reason": ["\x1b[2J", "\x9b"]},
    )
    written = capsys.readouterr().err
    assert written.count("\n") == 1
    assert written.removesuffix("\n").isprintable()


@pytest.mark.parametrize("form", LogFormat)
def test_secrets_and_the_texts_of_foreign_exceptions_are_not_logged(
    capsys: pytest.CaptureFixture[str], form: LogFormat
) -> None:
    configure_logging(LogLevel.DEBUG, form)
    address = SourceAddress.parse(f"postgresql://cdc:{NEEDLE}@db.example/shop")
    try:
        raise ValueError(f"row ({NEEDLE})")
    except ValueError:
        _log.warning("not maintained", extra={"password": Secret(NEEDLE), "address": address}, exc_info=True)
    written = capsys.readouterr().err
    assert NEEDLE not in written
    assert "***" in written
    assert "ValueError" in written
    assert "test_logs.py:" in written


def test_one_of_our_errors_is_logged_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogLevel.WARNING, LogFormat.JSON)
    try:
        raise ConfigError("no such key", hint="remove it")
    except ConfigError:
        _log.warning("not maintained", exc_info=True)
    assert json.loads(capsys.readouterr().err)["facts"]["exception"].startswith("PEN-1001: no such key")


def test_processes_of_spark_take_over_the_choice_and_are_silent_without_one() -> None:
    configure_from_environment()
    assert not any(isinstance(each, StderrHandler) for each in logging.getLogger("penstock").handlers)
    assert (worker_environment(), is_json()) == ({}, False)
    configure_logging(LogLevel.ERROR, LogFormat.JSON)
    chosen = worker_environment()
    assert chosen == {"PENSTOCK_LOG_LEVEL": "error", "PENSTOCK_LOG_FORMAT": "json"}
    configure_logging(LogLevel.DEBUG, LogFormat.TEXT)
    os.environ |= chosen
    configure_from_environment()
    (handler,) = [each for each in logging.getLogger("penstock").handlers if isinstance(each, StderrHandler)]
    assert (handler.level, is_json()) == (logging.ERROR, True)


def test_an_observer_logs_what_a_display_would_show(caplog: pytest.LogCaptureFixture) -> None:
    observer = PipelineObserver()
    observer.table_failed(TableName("public", "a"), TableStatus.failed(ConfigError("no", hint="do"), None))
    observer.warned(ConfigError("soon", hint="act"))
    observer.interrupted("the server is away", 2.0)
    observer.announced("public.a is resynced: its key changed")
    found = [(record.levelname, record.getMessage(), vars(record)["reason"]) for record in caplog.records]
    assert [each[:2] for each in found] == [
        ("ERROR", "table failed"),
        ("WARNING", "operator needed"),
        ("WARNING", "pipeline interrupted"),
        ("WARNING", "pipeline announcement"),
    ]
    assert all(reason for *_, reason in found)


def test_the_library_prints_nothing() -> None:
    program = "import logging, penstock; logging.getLogger('penstock.capture').warning('capture interrupted')"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert (result.stdout, result.stderr) == ("", "")


def test_a_record_that_py4j_logs_at_the_root_prints_nothing_and_no_later_line_twice() -> None:
    """As it does when the JVM dies. Python gives a root logger without handlers one that prints."""
    program = """
import contextlib, logging, sys
from penstock.cli.main import main
sys.argv = ["penstock", "run", "none.yaml"]
with contextlib.suppress(SystemExit):
    main()
logging.error("Exception while sending command.")
logging.getLogger("penstock.capture").warning("shown")
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Exception while" not in result.stderr
    assert result.stderr.count("shown") == 1


def test_with_json_the_error_of_a_command_is_a_json_line_wherever_the_option_is_given(tmp_path: Path) -> None:
    path = str(tmp_path / "none.yaml")
    for arguments in (
        ["--log-format", "json", "run", path],
        ["run", path, "--log-format=json"],
        ["tables", "list", path, "--log-format", "json"],
    ):
        command = [sys.executable, "-m", "penstock.cli.main", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 2, result.stderr
        found = json.loads(result.stderr)
        assert (found["level"], found["message"], found["facts"]["code"]) == (
            "error",
            "command failed",
            "PEN-1001",
        )


def test_an_unknown_level_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "run", str(tmp_path), "--log-level", "loud"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "'loud' is not one of" in result.stderr


@pytest.mark.parametrize(
    ("given", "shown"),
    [([], ["warned"]), (["--log-level=info"], ["told", "warned"]), (["--log-level", "ERROR"], [])],
)
def test_the_level_given_to_a_command_decides_what_it_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], shown: list[str]
) -> None:
    with pytest.raises(ConfigError):
        app([*given, "status", str(tmp_path / "none.yaml")], standalone_mode=False)
    _log.info("told")
    _log.warning("warned")
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == shown
