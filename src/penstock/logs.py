"""Logging for the command line and for the Python processes that Spark starts.

Log messages are fixed texts; their facts are in `extra`. The formatters here print both. As a library,
Penstock configures no logging: an application adds its handlers to the logger `penstock`.

The command line passes its settings to Spark's processes in environment variables.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import traceback
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from typing_extensions import override

from penstock.errors import PenstockError

LEVEL_VARIABLE, FORMAT_VARIABLE = "PENSTOCK_LOG_LEVEL", "PENSTOCK_LOG_FORMAT"

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_FRAMES = 5


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


def configure_logging(level: LogLevel, form: LogFormat) -> None:
    """Print Penstock's log records to standard error. A second call replaces the settings of the first."""
    logger = logging.getLogger("penstock")
    for handler in [each for each in logger.handlers if isinstance(each, StderrHandler)]:
        logger.removeHandler(handler)
    handler = StderrHandler()
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter())
    handler.setLevel(level.upper())
    logger.addHandler(handler)
    if not logger.isEnabledFor(handler.level):
        logger.setLevel(handler.level)
    os.environ |= {LEVEL_VARIABLE: level.value, FORMAT_VARIABLE: form.value}


def configure_from_environment() -> None:
    """Configure logging in a process that Spark started.

    Does nothing if the environment variables are not set.
    """
    level, form = (
        os.environ.get(LEVEL_VARIABLE, "").lower(),
        os.environ.get(FORMAT_VARIABLE, LogFormat.TEXT).lower(),
    )
    if level in set(LogLevel) and form in set(LogFormat):
        configure_logging(LogLevel(level), LogFormat(form))


def worker_environment() -> dict[str, str]:
    """The environment variables that pass the logging settings to other processes; empty if logging is not
    configured.
    """
    return {name: os.environ[name] for name in (LEVEL_VARIABLE, FORMAT_VARIABLE) if name in os.environ}


def is_json() -> bool:
    """Whether every line on standard error must be a JSON object."""
    return os.environ.get(FORMAT_VARIABLE) == LogFormat.JSON


class StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`, which a progress display may have replaced."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 as in logging.StreamHandler: a log record must not end the program
            self.handleError(record)


class TextFormatter(logging.Formatter):
    """`time LEVEL message  key=value …`, always one line."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={_word(value)}" for name, value in record_facts(record).items())
        line = f"{_time(record):%Y-%m-%d %H:%M:%S} {record.levelname} {_printable(record.getMessage())}"
        return f"{line} {facts}" if facts else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, facts."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        document = {
            "time": _time(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "facts": record_facts(record),
        }
        return _json(document)


def record_facts(record: logging.LogRecord) -> dict[str, object]:
    """The facts in `extra` as JSON values, and for an exception its class and innermost frames.

    The message of a foreign exception is left out, since it may quote a row or a connection string.
    """
    facts = {name: _plain(value) for name, value in vars(record).items() if name not in _STANDARD}
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        facts["exception"] = str(error) if isinstance(error, PenstockError) else type(error).__name__
        frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
        facts["at"] = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
    return facts


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _plain(value: object) -> object:
    """Convert a value to JSON types. An object of any other type becomes its `str`, which is stars for a
    `Secret`.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(name): _plain(each) for name, each in value.items()}
        case Collection() if not isinstance(value, bytes | bytearray | memoryview):
            return [_plain(each) for each in value]
        case _:
            return str(value)


def _word(value: object) -> str:
    """The text of a fact in a log line: a single word unchanged, anything else as JSON, so that its end is
    visible.
    """
    if isinstance(value, str) and value and value.isprintable() and not set(value) & set(' "='):
        return value
    return _json(value)


def _printable(text: str) -> str:
    """Escape the line breaks and control characters in a message. They could forge a log line or control a
    terminal.
    """
    return text if text.isprintable() else _json(text)


def _json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)
