from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.main import exit_code
from penstock.errors import AuthenticationError, ConfigError, PenstockError, SlotLostError


def _penstock(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "penstock.cli.main", *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_command() -> None:
    result = _penstock("--help")
    assert result.returncode == 0
    assert all(command in result.stdout for command in ("check", "run", "status", "verify", "demo"))


@pytest.mark.parametrize("command", ["run", "status", "verify"])
def test_a_missing_configuration_is_one_message_and_exit_2(tmp_path: Path, command: str) -> None:
    result = _penstock(command, str(tmp_path / "none.yaml"))
    assert result.returncode == 2
    assert "PEN-1001" in result.stderr
    assert "fix:" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (AuthenticationError("x"), 3),
        (SlotLostError("x"), 1),
        (PenstockError("x"), 1),
    ],
)
def test_exit_codes_tell_configuration_environment_and_runtime_apart(error: PenstockError, code: int) -> None:
    assert exit_code(error) == code


def test_check_reports_a_missing_configuration_like_any_other_problem(tmp_path: Path) -> None:
    result = _penstock("check", str(tmp_path / "none.yaml"), "--json")
    assert result.returncode == 2
    assert "PEN-1001" in result.stdout
    assert "Traceback" not in result.stderr
