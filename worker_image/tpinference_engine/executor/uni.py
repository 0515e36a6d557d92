"""One rank in the engine core's own thread: tensor parallelism of 1, and most tests.

Steps take the same path of bytes, checks and lag as with real ranks; only the process border is
missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpinference_engine.config import EngineConfig
from tpinference_engine.errors import RankDied, TPInferenceError, cause_for
from tpinference_engine.executor.base import BeginStage, RankPlace
from tpinference_engine.executor.bring_up import (
    Arguments,
    bring_up,
    check_rpc_method,
    read_places,
    rpc_failure,
)
from tpinference_engine.executor.step_in_flight import StepInFlight
from tpinference_engine.runner.base import RunnerFactory
from tpinference_engine.step import StepInput, StepOutput
from tpinference_engine.worker import Worker


class UniExecutor:
    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        runner_factory: RunnerFactory | None = None,
    ) -> None:
        """`runner_factory` None = the model."""
        self._config = config
        self._runner_factory = runner_factory
        self._worker: Worker | None = None
        self._in_flight = StepInFlight(config.step_limits(max_model_len))
        self._answer = b""
        self.places: tuple[RankPlace, ...] = ()
        self.num_blocks = 0

    def start(self, begin_stage: BeginStage) -> None:
        self._worker = Worker(self._config, self._runner_factory)
        self.places = read_places(self._call, 1)
        self.num_blocks = bring_up(self._call, [1], self._config, begin_stage)

    def submit(self, step: StepInput) -> None:
        worker = self._require_worker()
        self._answer = worker.step(self._in_flight.pack(step))

    def collect(self) -> StepOutput:
        return self._in_flight.unpack([self._answer])

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> list[Any]:
        """The time limit has no use here: nobody could be waiting for it but this thread."""
        assert not self._in_flight, "an RPC is fenced: no step is in flight"
        check_rpc_method(method)
        try:
            return self._call(method, [tuple(args)])
        except TPInferenceError as error:
            failure = rpc_failure(method, error)
            raise failure from cause_for(failure, error)

    @property
    def step_transport(self) -> None:
        return None

    def rest(self) -> None:
        """Nobody spins here."""

    def check_alive(self) -> None:
        self._require_worker()

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _call(self, method: str, arguments: Sequence[Arguments]) -> list[Any]:
        worker = self._require_worker()
        with worker.naming_errors():
            return [getattr(worker, method)(*given) for given in arguments]

    def _require_worker(self) -> Worker:
        if self._worker is None:
            raise RankDied("rank 0 is not running: not started, or shut down", rank=0)
        return self._worker
