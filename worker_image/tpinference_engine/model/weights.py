"""Reads parts of tensors from a directory of safetensors. It knows names, no architecture.

Files are mapped and only the wanted slice is copied, so no rank ever holds the whole model.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError

from tpinference_engine.errors import InvalidModel
from tpinference_engine.model.shard import Span
from tpinference_engine.model.weight_files import (
    INDEX_FILE,
    SINGLE_FILE,
    open_weights,
    read_index,
)


class Checkpoint:
    """The tensors of one model directory, open while inside `with`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._file_of = read_index(directory)

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
            opened = open_weights(self._directory / name, "pt")
            self._open[name] = self._stack.enter_context(opened)
        return self._open[name]
