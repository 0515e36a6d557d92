"""The engine's command as a process: help, version, and how it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpinference_engine.__main__ import main


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        pytest.param(["--help"], "supervise", id="the command"),
        pytest.param(["serve", "--help"], "--tensor-parallel-size", id="serve"),
        pytest.param(["supervise", "--help"], "--role", id="supervise"),
        pytest.param(["--version"], "0.1.0", id="version"),
    ],
)
def test_help_is_shown(argv: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 0
    assert shown in capsys.readouterr().out


def test_wrong_flag_ends_the_process_with_2_and_leaves_the_failure(tmp_path: Path) -> None:
    failure_file = tmp_path / "failure.json"
    ended = subprocess.run(
        [sys.executable, "-m", "tpinference_engine", "serve", "/m", "--device", "tpu"],
        env={**os.environ, "TPINFERENCE_FAILURE_FILE": str(failure_file)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert "error: argument --device: invalid choice: 'tpu'" in ended.stderr
    failure = json.loads(failure_file.read_text())
    assert failure["reason"] == "InvalidConfig"
    assert "'cpu', 'cuda'" in failure["message"]


def test_supervisor_needs_neither_ray_nor_torch() -> None:
    code = (
        "import sys, tpinference_engine.supervisor.command_line, tpinference_engine.__main__;"
        "print(sorted({'ray', 'torch'} & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
