"""One way to carry steps, and which of them a run compares. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tpinference_engine.config import Backend

Device = Literal["emulated", "cpu", "cuda"]
"""emulated = a rank that waits for a fixed time, on any machine; cuda without a model = a captured
graph of matrix products."""
Placement = Literal["same", "across"]
"""Whether the driver's raylet is the ranks'."""
Return = Literal["lagged", "sync"]
"""Whether call N returns what step N-1 produced, as in the product, or what step N did."""
Path = Literal["compiled-graph", "actor-call", "shared-memory", "in-process"]

PATHS_OF_BACKEND: dict[Backend, tuple[Path, ...]] = {
    "ray": ("compiled-graph", "actor-call"),
    "mp": ("shared-memory",),
    "uni": ("in-process",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    device: Device
    step_ms: float | None
    """Wanted time of a step on the device; None = the model's own."""
    tp: int
    backend: Backend
    transport: Path
    placement: Placement
    returns: Return
    in_flight: int

    @property
    def is_baseline(self) -> bool:
        return self.backend == "uni"

    @property
    def steps(self) -> tuple[Device, float | None, int, Return]:
        """Cells that agree in it take the same steps, and differ in how these reach the ranks."""
        return self.device, self.step_ms, self.tp, self.returns

    @property
    def name(self) -> str:
        step = "model" if self.step_ms is None else f"{self.step_ms:g} ms"
        return (
            f"{self.device} {step} tp{self.tp} {self.backend} {self.transport} {self.placement} "
            f"{self.returns} {self.in_flight} in flight"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the command line asks for: every combination that there is."""

    devices: Sequence[tuple[Device, float | None]]
    tps: Sequence[int]
    backends: Sequence[Backend]
    transports: Sequence[Path]
    placements: Sequence[Placement]
    returns: Sequence[Return]
    in_flights: Sequence[int]


def choose_cells(choice: Choice) -> tuple[Cell, ...]:
    """With the steps driven in-process wherever something is to be compared with them."""
    found: list[Cell] = []
    for (device, step_ms), tp, returns in itertools.product(
        choice.devices, choice.tps, choice.returns
    ):
        for backend, transport, placement, in_flight in _ways(choice):
            found.append(
                Cell(
                    device=device,
                    step_ms=step_ms,
                    tp=tp,
                    backend=backend,
                    transport=transport,
                    placement=placement,
                    returns=returns,
                    in_flight=in_flight,
                )
            )
    return tuple(found)


def _ways(choice: Choice) -> Iterator[tuple[Backend, Path, Placement, int]]:
    yield "uni", "in-process", "same", 1
    if "mp" in choice.backends and "shared-memory" in choice.transports and 1 in choice.in_flights:
        # One slot each way: a second message has no place.
        yield "mp", "shared-memory", "same", 1
    if "ray" in choice.backends:
        for transport, placement, in_flight in itertools.product(
            PATHS_OF_BACKEND["ray"], choice.placements, choice.in_flights
        ):
            if transport in choice.transports:
                yield "ray", transport, placement, in_flight
