"""Ranks as processes of this machine, without Ray: the yardstick, and the way out on one node.

One thread calls it. Any error of one rank ends all, as under Ray.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NoReturn

from tpinference_engine.config import EngineConfig
from tpinference_engine.errors import (
    GroupFailed,
    RankDied,
    StartupTimedOut,
    StepTimedOut,
    TPInferenceError,
)
from tpinference_engine.executor.acknowledgement import reconcile_outputs
from tpinference_engine.executor.base import BeginStage, RankPlace
from tpinference_engine.executor.deadline import Deadline
from tpinference_engine.executor.rank_process import run_rank
from tpinference_engine.runner.base import RunnerFactory
from tpinference_engine.step import StepInput, StepOutput, decode_output, encode_input
from tpinference_engine.transport.shared_memory import SharedMemoryTransport


@dataclass(frozen=True, slots=True)
class _Rank:
    process: SpawnProcess
    calls: Connection


class MultiprocessExecutor:
    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        runner_factory: RunnerFactory | None = None,
    ) -> None:
        """`max_model_len` sizes the slots. `runner_factory` None = the model."""
        self._config = config
        self._limits = config.step_limits(max_model_len)
        self._runner_factory = runner_factory
        self._ranks: list[_Rank] = []
        self._places: tuple[RankPlace, ...] = ()
        self._transport: SharedMemoryTransport | None = None
        self._in_flight: StepInput | None = None
        self._failure: TPInferenceError | None = None
        self._num_blocks = 0

    def start(self, begin_stage: BeginStage) -> None:
        deadline = Deadline.after(self._config.startup_timeout_s)
        try:
            self._spawn()
            self._places = self._find_places(deadline)
            begin_stage("weightsLoaded")
            self._load(deadline)
            begin_stage("warmedUp")
            self._call("warm_up", (), deadline)
        except StepTimedOut as error:
            raise StartupTimedOut(
                f"start-up took longer than startup_timeout_s "
                f"{self._config.startup_timeout_s:g}: {error}"
            ) from error

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def places(self) -> tuple[RankPlace, ...]:
        return self._places

    def submit(self, step: StepInput) -> None:
        self.check_alive()
        assert self._transport is not None, "start has returned"
        assert self._in_flight is None, f"step {step.step_id} while another is in flight"
        payload = encode_input(step)
        self._limits.check_input(payload)
        self._transport.submit(payload)
        self._in_flight = step

    def collect(self) -> StepOutput:
        assert self._transport is not None and self._in_flight is not None, "submit came before"
        step, self._in_flight = self._in_flight, None
        try:
            answers = self._transport.result(self._config.step_timeout_s)
            return reconcile_outputs(step, [decode_output(answer) for answer in answers])
        except TPInferenceError as error:
            self._fail(error)

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> list[Any]:
        assert self._in_flight is None, "an RPC is fenced: no step is in flight"
        return self._call_each(method, [tuple(args)] * len(self._ranks), timeout_s)

    def check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            for rank in range(len(self._ranks)):
                self._check_rank(rank)
        except RankDied as error:
            self._fail(error)

    def shutdown(self) -> None:
        self._kill()
        for rank in self._ranks:
            rank.process.join()
            rank.process.close()
            rank.calls.close()
        self._ranks = []
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")
        size = self._config.tensor_parallel_size
        self._transport = transport = SharedMemoryTransport(
            context,
            size,
            max_input_bytes=self._limits.max_input_bytes,
            max_output_bytes=self._limits.max_output_bytes,
        )
        transport.check_rank = self._check_rank
        transport.raise_failure = self._raise_reported
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, self._config, self._runner_factory, transport.slots_of(rank), theirs)
            process = context.Process(target=run_rank, args=arguments, name=f"rank-{rank}")
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours))

    def _find_places(self, deadline: Deadline) -> tuple[RankPlace, ...]:
        return tuple(
            RankPlace(rank, str(p["pod"]), str(p["node"]), str(p["device"]), int(p["pid"]))
            for rank, p in enumerate(self._call("place", (), deadline))
        )

    def _load(self, deadline: Deadline) -> None:
        size, epoch = len(self._ranks), self._config.epoch
        store: tuple[str, int] | None = None
        if size > 1:
            self._ranks[0].calls.send(("open_store", ()))
            store = self._gather([0], "open_store", deadline.remaining_s)[0]
        arguments = [(rank, epoch, store, size) for rank in range(size)]
        self._call_each("initialize", arguments, deadline.remaining_s)
        self._call("load_model", (), deadline)
        capacities = self._call("cache_capacity", (), deadline)
        self._num_blocks = self._config.num_gpu_blocks_override or min(capacities)
        self._call("allocate_cache", (self._num_blocks,), deadline)

    def _call(self, method: str, args: tuple[Any, ...], deadline: Deadline) -> list[Any]:
        return self.collective_rpc(method, args, deadline.remaining_s)

    def _call_each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None
    ) -> list[Any]:
        self.check_alive()
        for rank, args in zip(self._ranks, arguments, strict=True):
            rank.calls.send((method, args))
        answers = self._gather(range(len(self._ranks)), method, timeout_s)
        return [answers[rank] for rank in range(len(self._ranks))]

    def _gather(self, ranks: Sequence[int], method: str, timeout_s: float | None) -> dict[int, Any]:
        """The first failure ends the wait: the others may wait for that rank, for good."""
        waiting = {self._ranks[rank].calls: rank for rank in ranks}
        answers: dict[int, Any] = {}
        deadline = None if timeout_s is None else Deadline.after(timeout_s)
        try:
            while waiting:
                left = None if deadline is None else deadline.remaining_s
                ready = wait(list(waiting), left)
                if not ready:
                    late = sorted(waiting.values())
                    raise StepTimedOut(f"{method}: no answer of ranks {late}", rank=late[0])
                for calls in ready:
                    assert isinstance(calls, Connection), "only these were waited for"
                    rank = waiting.pop(calls)
                    answers[rank] = self._receive(rank)
        except TPInferenceError as error:
            self._fail(error)
        return answers

    def _receive(self, rank: int) -> Any:
        try:
            succeeded, value = self._ranks[rank].calls.recv()
        except (EOFError, ConnectionError):
            self._ranks[rank].process.join()
            self._check_rank(rank)
            raise GroupFailed(f"rank {rank} closed its pipe", rank=rank) from None
        if succeeded:
            return value
        raise value

    def _raise_reported(self, rank: int) -> None:
        """A step's error was sent before its mark was."""
        self._receive(rank)

    def _check_rank(self, rank: int) -> None:
        code = self._ranks[rank].process.exitcode
        if code is not None:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            pid = self._ranks[rank].process.pid
            raise RankDied(f"rank {rank} (pid {pid}) died: {how}", rank=rank)

    def _fail(self, error: TPInferenceError) -> NoReturn:
        if self._failure is None:
            self._failure = error
        self._kill()
        raise self._failure

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
