"""Only slices are read, and a damaged directory is refused by file and tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tpinference_engine.errors import InvalidModel
from tpinference_engine.model.config import read_model_config
from tpinference_engine.model.load import load_llama, num_bytes, tensors
from tpinference_engine.model.shard import Span, shard_of
from tpinference_engine.model.weights import Checkpoint

CPU = torch.device("cpu")
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def directory(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(tiny_model("llama-9-heads-3-kv"), tmp_path / "model"))


def load(directory: Path, rank: int = 0, size: int = 1) -> object:
    config = read_model_config(directory)
    return load_llama(directory, config, shard_of(config, rank, size), torch.float32, CPU)


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_only_the_wanted_part_is_read(directory: Path) -> None:
    whole = load_file(directory / "model.safetensors")[QUERY]
    with Checkpoint(directory) as checkpoint:
        rows = checkpoint.read(QUERY, (72, 72), Span(8, 24))
        columns = checkpoint.read(QUERY, (72, 72), Span(0, 72), Span(3, 5))
    assert torch.equal(rows, whole[8:24]) and torch.equal(columns, whole[:, 3:5])


def test_loaded_weights_do_not_depend_on_the_file(directory: Path) -> None:
    """The mapped pages are copied; a volume may go away afterwards."""
    file = directory / "model.safetensors"
    before, loaded = load(directory), load(directory)
    with file.open("r+b") as handle:
        handle.seek(file.stat().st_size // 2)
        handle.write(bytes(file.stat().st_size - file.stat().st_size // 2))
    assert all(torch.equal(*pair) for pair in zip(tensors(before), tensors(loaded), strict=True))
    after = load(directory)
    assert not all(torch.equal(*pair) for pair in zip(tensors(before), tensors(after), strict=True))


def test_ranks_share_the_matrices_without_overlap(directory: Path) -> None:
    whole = num_bytes(load(directory))
    parts = [num_bytes(load(directory, rank, 3)) for rank in range(3)]
    norms, padding = 4 * 72 * 5, 4 * 72 * (3 * 128 - 256)
    assert sum(parts) == whole + 2 * norms + padding


def test_sharded_files_are_found_by_their_index(directory: Path) -> None:
    expected = load(directory)
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    files = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, directory / file)
    (directory / "model.safetensors").unlink()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert num_bytes(load(directory)) == num_bytes(expected)
    (directory / "model-1.safetensors").unlink()
    with pytest.raises(InvalidModel, match=r"model-1.safetensors.* can't be read"):
        load(directory)


def test_index_can_not_lead_out_of_the_directory(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {QUERY: "../../elsewhere.safetensors"}}))
    with Checkpoint(directory) as checkpoint, pytest.raises(InvalidModel) as caught:
        checkpoint.read(QUERY, (72, 72))
    assert str(directory / "elsewhere.safetensors") in str(caught.value)


@pytest.mark.parametrize("size", [0, 5, 1000, -1])
def test_truncated_file_is_refused(directory: Path, size: int) -> None:
    file = directory / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:size])
    with pytest.raises(InvalidModel, match=r"model.safetensors.* can't be read.*truncated"):
        load(directory)


def test_missing_tensor_is_named(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.pop(QUERY))
    with pytest.raises(InvalidModel, match=f"{QUERY}.*model.safetensors"):
        load(directory)


def test_missing_weights_are_named(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(InvalidModel, match="neither 'model.safetensors' nor"):
        load(directory)


def test_tensor_of_another_shape_is_refused(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.update({QUERY: torch.zeros(72, 71)}))
    with pytest.raises(InvalidModel, match=rf"{QUERY}.*\(72, 71\).*\(72, 72\)"):
        load(directory)


def test_integer_tensor_is_refused(directory: Path) -> None:
    integers = torch.zeros(72, 72, dtype=torch.int8)
    rewrite(directory, lambda tensors: tensors.update({QUERY: integers}))
    with pytest.raises(InvalidModel, match=f"{QUERY}.*torch.int8, must be floating point"):
        load(directory)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}'])
def test_unreadable_index_is_refused(directory: Path, text: str) -> None:
    (directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InvalidModel, match="has no readable weight_map"):
        load(directory)
