"""Which files a model directory has its weights in, and whether they are whole. Imports no torch.

The engine core asks before it starts any rank, so that a broken download is refused within seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from tpinference_engine.errors import InvalidModel

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def check_weight_files(directory: Path) -> None:
    """Reads each file's header, which has the length of all that must follow. Raises InvalidModel
    at the first file that is missing, cut or something else."""
    file_of = read_index(directory)
    for name in sorted(set(file_of.values())) if file_of is not None else (SINGLE_FILE,):
        with open_weights(directory / name, "np"):
            pass


def open_weights(path: Path, framework: Literal["np", "pt"]) -> Any:
    """A context manager. Raises InvalidModel when the file can't be read or is not whole."""
    try:
        return safe_open(path, framework=framework, device="cpu")
    except (OSError, SafetensorError) as error:
        raise InvalidModel(
            f"weights file {str(path)!r} can't be read, it is missing, truncated or "
            f"no safetensors: {error}"
        ) from error


def read_index(directory: Path) -> dict[str, str] | None:
    """File of each tensor; None if all are in the single file."""
    path = directory / INDEX_FILE
    if not path.exists():
        if not (directory / SINGLE_FILE).exists():
            raise InvalidModel(f"{str(directory)!r} has neither {SINGLE_FILE!r} nor {INDEX_FILE!r}")
        return None
    try:
        found = json.loads(path.read_text())["weight_map"]
        # Names of files here, never paths: an index must not lead out of its directory.
        return {str(tensor): Path(str(file)).name for tensor, file in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidModel(f"{str(path)!r} has no readable weight_map: {error!r}") from error
