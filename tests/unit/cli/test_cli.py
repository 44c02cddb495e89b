from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from penstock import __version__
from penstock.cli import main
from penstock.errors import (
    AuthenticationError,
    ConfigError,
    PenstockError,
    PublicationError,
    ServerUnfitError,
    SlotFailoverError,
    SlotLimitError,
    SlotLostError,
    SpoolCorruptError,
    StandbyError,
)
from penstock.pipeline.checks.findings import CheckReport, Step, exit_code
from penstock.pipeline.epoch_log import Epoch, EpochLog
from penstock.pipeline.table_states import TableState, TableStatus
from penstock.position import Position
from penstock.schema import TableName


def _penstock(*arguments: str) -> subprocess.CompletedProcess[str]:
    command, narrow = [sys.executable, "-m", "penstock.cli.main", *arguments], {**os.environ, "COLUMNS": "80"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=narrow)


def test_help_names_every_command() -> None:
    result = _penstock("--help")
    assert result.returncode == 0
    application = get_command(main.app)
    assert isinstance(application, TyperGroup)
    assert len(application.commands) > 8
    assert [name for name in application.commands if f" {name} " not in result.stdout] == []


def test_the_version_is_printed() -> None:
    result = _penstock("--version")
    assert (result.returncode, result.stdout) == (0, f"penstock {__version__}\n")


@pytest.mark.parametrize("command", ["run", "status", "verify", "drop"])
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
        (SlotLostError("x"), 3),
        (PublicationError("x"), 3),
        (ServerUnfitError("x"), 3),
        (SlotLimitError("x"), 3),
        (StandbyError("x"), 3),
        (SlotFailoverError("x"), 3),
        (SpoolCorruptError("x"), 1),
        (PenstockError("x"), 1),
    ],
)
def test_exit_codes_tell_configuration_environment_and_runtime_apart(error: PenstockError, code: int) -> None:
    assert exit_code(error.code) == code
    step = Step("any")
    step.problem(error)
    assert CheckReport("shop", [step]).exit_code == (2 if code == 2 else 3)


def test_check_reports_a_missing_configuration_like_any_other_problem(tmp_path: Path) -> None:
    result = _penstock("check", str(tmp_path / "none.yaml"), "--json")
    assert result.returncode == 2
    assert "PEN-1001" in result.stdout
    assert "Traceback" not in result.stderr


def test_a_run_ends_with_the_same_code_as_the_check(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    dsn = "postgresql://cdc@127.0.0.1:1/shop?connect_timeout=2"
    path.write_text(
        f"pipeline: shop\nsource: {{dsn: '{dsn}', password: {{file: none}}}}\ntables: [a.b]\nsink: "
        f"{{delta: {{path: lake}}}}\n"
    )
    assert _penstock("check", str(path)).returncode == _penstock("run", str(path)).returncode == 2
    assert _penstock("verify", str(path)).returncode == 2


def test_verify_finds_out_without_spark_that_it_cannot_start(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    dsn = "postgresql://cdc@127.0.0.1:1/shop?connect_timeout=2"
    path.write_text(
        f"pipeline: shop\nsource: {{dsn: '{dsn}'}}\ntables: [a.b]\nsink: {{delta: {{path: lake}}}}\n"
    )
    unreachable, unnamed = (
        _penstock("verify", str(path), "--json"),
        _penstock("verify", str(path), "--table", "no_schema"),
    )
    assert (unreachable.returncode, unnamed.returncode) == (3, 2)
    assert "PEN-1101" in unreachable.stderr
    assert "--table" in unnamed.stderr
    assert not (tmp_path / "state").exists()


def test_a_file_of_a_pipeline_that_is_closed_to_this_user_is_one_message_and_exit_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(**_: object) -> None:
        raise PermissionError(13, "Permission denied", "/srv/state/tables.json")

    monkeypatch.setattr(main, "app", refused)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 3
    assert "permission denied: /srv/state/tables.json" in capsys.readouterr().err


def test_status_of_many_tables_fits_a_terminal_of_80_columns_without_all(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    dsn = "postgresql://cdc@127.0.0.1:1/shop?connect_timeout=2"
    path.write_text(
        f"pipeline: shop\nsource: {{dsn: '{dsn}'}}\ntables: [a.b]\nsink: {{delta: {{path: lake}}}}\n"
    )
    names = [
        TableName("a_schema_with_a_long_name", f"a_table_with_a_name_that_takes_half_of_the_line_{number:02}")
        for number in range(30)
    ]
    tables = {name: TableStatus(TableState.STREAMING, Position.of(80)) for name in names}
    tables[names[-1]] = TableStatus.failed(ServerUnfitError("too old", hint="upgrade"), Position.of(80))
    (tmp_path / "lake").mkdir()
    EpochLog(tmp_path / "lake", "shop").record(Epoch(1, Position.of(80), None, "7/1", tables))
    few, every = (_penstock("status", str(path), *options).stdout.splitlines() for options in ([], ["--all"]))
    assert next(line for line in few if line.startswith("a_schema")).split()[:2] == [str(names[-1]), "failed"]
    assert few[-1] == "… and 9 more that are streaming; --all lists them"
    assert sorted(line.split()[0] for line in every if line.startswith("a_schema")) == [
        str(name) for name in names
    ]
