"""How the engine core reaches the ranks: one interface for every backend.

Two ways in, as in the design this project started from: the *step* goes through a transport (a
compiled graph under ray), every other call is a *collective RPC* to all ranks. Both are used by one
thread, and an RPC only when no step is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tpinference_engine.config import Transport
from tpinference_engine.step import StepInput, StepOutput

Stage = Literal["rayJoined", "weightsLoaded", "graphCompiled", "warmedUp"]
"""A part of start-up, named after what holds at its end. A backend without Ray or a graph leaves
those out."""

BeginStage = Callable[[Stage], None]
"""Called when a stage begins; that ends the one before it. The return of `start` ends the last."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank runs, as read back after placement."""

    rank: int
    pod: str
    """Host name, which is the pod's name in a cluster."""
    node: str
    """The Kubernetes node, else Ray's node id."""
    device: str
    pid: int


class Executor(Protocol):
    def start(self, begin_stage: BeginStage) -> None:
        """After it, ranks are placed, loaded and warm, and the step path is ready.

        Raises TPInferenceError.
        """

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache that every rank has; known after start."""

    @property
    def places(self) -> tuple[RankPlace, ...]:
        """The map of ranks, in order; known after start."""

    @property
    def step_transport(self) -> Transport | None:
        """Of the next step, which changes when the engine rests; None = there is no way to go."""

    def submit(self, step: StepInput) -> None:
        """Sends one call. At most one is in flight."""

    def collect(self) -> StepOutput:
        """Waits for the call in flight; all ranks acknowledged alike. Raises GroupFailed.

        Acknowledgements are compared by `acknowledgement.reconcile_outputs`.
        """

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> list[Any]:
        """Calls `method` of every rank's worker, answers in rank order.

        Raises InvalidConfig, before anything is sent, for what is no public method. One rule for
        every backend: a rank that raises has lost the group, whatever it raises. So all else is
        raised as GroupFailed, and the ranks are of no more use then.
        """

    def rest(self) -> None:
        """No step is in flight and none is to come soon: stop whatever costs processor time.

        The next `submit` needs no notice. Raises GroupFailed. Idempotent.
        """

    def check_alive(self) -> None:
        """Raises RankDied for the first rank whose process has ended."""

    def shutdown(self) -> None:
        """Ends every rank (killed first, torn down second) and all that start made. Idempotent."""
