"""Weights that can't be read are refused before anything that serves them is started."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.parts import build_parts
from tpinference_engine.errors import InvalidModel
from tpinference_engine.model.weight_files import check_weight_files

FILE = "model.safetensors"


@pytest.fixture
def directory(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(tiny_model("llama-9-heads-3-kv"), tmp_path / "model"))


@pytest.fixture
def sharded(directory: Path) -> Path:
    """Its weights in two files, by an index."""
    (directory / FILE).rename(directory / "a.safetensors")
    shutil.copy(directory / "a.safetensors", directory / "b.safetensors")
    weight_map = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (directory / f"{FILE}.index.json").write_text(json.dumps(weight_map))
    return directory


def cut(file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])


def test_whole_files_pass(directory: Path) -> None:
    check_weight_files(directory)


@pytest.mark.parametrize("missing_bytes", [1, 4096])
def test_a_file_that_lacks_its_end_is_named(directory: Path, missing_bytes: int) -> None:
    cut(directory / FILE, (directory / FILE).stat().st_size - missing_bytes)
    with pytest.raises(InvalidModel, match=FILE):
        check_weight_files(directory)


def test_every_file_of_an_index_is_looked_at(sharded: Path) -> None:
    check_weight_files(sharded)
    cut(sharded / "b.safetensors", 100)
    with pytest.raises(InvalidModel, match=r"b\.safetensors"):
        check_weight_files(sharded)
    (sharded / "b.safetensors").unlink()
    with pytest.raises(InvalidModel, match=r"b\.safetensors"):
        check_weight_files(sharded)


def test_the_engine_core_refuses_before_it_makes_an_executor(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr(
        "tpinference_engine.engine.parts.make_executor", lambda *args: made.append(args)
    )
    config = EngineConfig(model=directory, served_model_name=("m",))
    build_parts(config)
    assert len(made) == 1
    cut(directory / FILE, 100)
    with pytest.raises(InvalidModel, match=FILE):
        build_parts(config)
    assert len(made) == 1


def test_looking_imports_no_torch() -> None:
    code = "import sys, tpinference_engine.model.weight_files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
