"""Reads parts of tensors from a directory of safetensors. It knows names, no architecture.

Files are mapped and only the wanted slice is copied, so no rank ever holds the whole model.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from tpinference_engine.errors import InvalidModel
from tpinference_engine.model.shard import Span

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class Checkpoint:
    """The tensors of one model directory, open while inside `with`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._file_of = _read_index(directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.clear()
        self._stack.close()

    def read(self, name: str, shape: tuple[int, ...], *spans: Span) -> torch.Tensor:
        """The part of tensor `name` that `spans` cut out, one a leading dimension.

        It is a view of the mapped file: pages are read when it is copied, no others. `shape` is
        what the whole tensor must have.
        """
        file_name = self._file_of.get(name) if self._file_of is not None else SINGLE_FILE
        if file_name is None:
            raise InvalidModel(f"tensor {name!r} is missing in {INDEX_FILE!r}")
        handle = self._file(file_name)
        try:
            part = handle.get_slice(name)
            found = tuple(part.get_shape())
            if found != shape:
                raise InvalidModel(
                    f"tensor {name!r} in {file_name!r} has shape {found!r}, "
                    f"'config.json' makes it {shape!r}"
                )
            tensor: torch.Tensor = part[tuple(slice(s.start, s.stop) for s in spans) or slice(None)]
        except SafetensorError as error:
            raise InvalidModel(f"tensor {name!r} in {file_name!r}: {error}") from error
        if not tensor.is_floating_point():
            raise InvalidModel(
                f"tensor {name!r} in {file_name!r} is {tensor.dtype}, must be floating point"
            )
        return tensor

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self._directory / name
            try:
                opened = safe_open(path, framework="pt", device="cpu")
                self._open[name] = self._stack.enter_context(opened)
            except (OSError, SafetensorError) as error:
                raise InvalidModel(
                    f"weights file {str(path)!r} can't be read, it is missing, truncated or "
                    f"no safetensors: {error}"
                ) from error
        return self._open[name]


def _read_index(directory: Path) -> dict[str, str] | None:
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
