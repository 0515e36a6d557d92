"""One rank in the engine core's own thread: tensor parallelism of 1, and most tests.

Steps take the same path of bytes, checks and lag as with real ranks; only the process border is
missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpinference_engine.config import EngineConfig
from tpinference_engine.errors import GroupFailed, RankDied, TPInferenceError
from tpinference_engine.executor.acknowledgement import reconcile_outputs
from tpinference_engine.executor.base import BeginStage, RankPlace
from tpinference_engine.runner.base import RunnerFactory
from tpinference_engine.step import StepInput, StepOutput, decode_output, encode_input
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
        self._limits = config.step_limits(max_model_len)
        self._runner_factory = runner_factory
        self._worker: Worker | None = None
        self._places: tuple[RankPlace, ...] = ()
        self._num_blocks = 0
        self._in_flight: tuple[StepInput, bytes] | None = None

    def start(self, begin_stage: BeginStage) -> None:
        self._worker = worker = Worker(self._config, self._runner_factory)
        place = worker.place()
        self._places = (
            RankPlace(
                rank=0,
                pod=str(place["pod"]),
                node=str(place["node"]),
                device=str(place["device"]),
                pid=int(place["pid"]),
            ),
        )
        begin_stage("weightsLoaded")
        worker.initialize(0, self._config.epoch)
        worker.load_model()
        begin_stage("warmedUp")
        self._num_blocks = self._config.num_gpu_blocks_override or worker.cache_capacity()
        worker.allocate_cache(self._num_blocks)
        worker.warm_up()

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def places(self) -> tuple[RankPlace, ...]:
        return self._places

    def submit(self, step: StepInput) -> None:
        assert self._in_flight is None, f"step {step.step_id} while another is in flight"
        payload = encode_input(step)
        self._limits.check_input(payload)
        worker = self._require_worker()
        try:
            self._in_flight = step, worker.step(payload)
        except TPInferenceError:
            raise
        except Exception as error:
            raise GroupFailed(
                f"rank 0 failed in step {step.step_id}: {type(error).__name__}: {error}", rank=0
            ) from error

    def collect(self) -> StepOutput:
        assert self._in_flight is not None, "no step is in flight"
        (step, answer), self._in_flight = self._in_flight, None
        return reconcile_outputs(step, [decode_output(answer)])

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> list[Any]:
        """The time limit has no use here: nobody could be waiting for it but this thread."""
        worker = self._require_worker()
        try:
            return [getattr(worker, method)(*args)]
        except TPInferenceError:
            raise
        except Exception as error:
            raise GroupFailed(
                f"rank 0 failed in {method}: {type(error).__name__}: {error}", rank=0
            ) from error

    def check_alive(self) -> None:
        self._require_worker()

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _require_worker(self) -> Worker:
        if self._worker is None:
            raise RankDied("rank 0 is not running: not started, or shut down", rank=0)
        return self._worker
