"""Ranks as processes of this machine, without Ray: the yardstick, and the way out on one node.

One thread calls it. Any error of one rank ends all, as under Ray.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NoReturn

from tpinference_engine.config import EngineConfig, Transport
from tpinference_engine.errors import (
    GroupFailed,
    RankDied,
    StepTimedOut,
    TPInferenceError,
)
from tpinference_engine.executor.base import BeginStage, RankPlace
from tpinference_engine.executor.bring_up import (
    Arguments,
    AsFailure,
    as_it_is,
    bring_up,
    check_rpc_method,
    read_places,
    rpc_failure,
    startup_deadline,
)
from tpinference_engine.executor.deadline import Deadline
from tpinference_engine.executor.rank_process import run_rank
from tpinference_engine.executor.step_in_flight import StepInFlight
from tpinference_engine.exit_code import signal_name
from tpinference_engine.runner.base import RunnerFactory
from tpinference_engine.step import StepInput, StepOutput
from tpinference_engine.transport.shared_memory import SharedMemoryTransport

_NAMING_S = 1.0
"""How long an error that names no rank waits for a process to end."""
_CLOSED_S = 1.0
"""For a rank that closed its pipe to end by itself."""
_END_S = 5.0
"""For killed ranks to be gone; the kernel may hold one for as long as it likes."""

logger = logging.getLogger(__name__)


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
        self._transport: SharedMemoryTransport | None = None
        self._in_flight = StepInFlight(self._limits)
        self._failure: TPInferenceError | None = None
        self.places: tuple[RankPlace, ...] = ()
        self.num_blocks = 0

    def start(self, begin_stage: BeginStage) -> None:
        with startup_deadline(self._config) as deadline:
            self._spawn()

            def call(method: str, arguments: Sequence[Arguments]) -> list[Any]:
                return self._call(method, arguments, deadline.remaining_s)

            size = len(self._ranks)
            self.places = read_places(call, size)
            self.num_blocks = bring_up(call, [size] * size, self._config, begin_stage)

    def submit(self, step: StepInput) -> None:
        self.check_alive()
        assert self._transport is not None, "start has returned"
        self._transport.submit(self._in_flight.pack(step))

    def collect(self) -> StepOutput:
        assert self._transport is not None and self._in_flight, "submit came before"
        try:
            return self._in_flight.unpack(self._transport.result(self._config.step_timeout_s))
        except TPInferenceError as error:
            self._fail(error)

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> list[Any]:
        assert not self._in_flight, "an RPC is fenced: no step is in flight"
        check_rpc_method(method)
        arguments = [tuple(args)] * len(self._ranks)
        return self._call(method, arguments, timeout_s, partial(rpc_failure, method))

    @property
    def step_transport(self) -> Transport:
        return "shared-memory"

    def rest(self) -> None:
        """Nobody spins here."""

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
            rank.calls.close()
            rank.process.join(_END_S)
            if rank.process.exitcode is None:
                logger.warning("pid %s still runs %s s after SIGKILL", rank.process.pid, _END_S)
            else:
                rank.process.close()
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

    def _call(
        self,
        method: str,
        arguments: Sequence[Arguments],
        timeout_s: float | None,
        as_failure: AsFailure = as_it_is,
    ) -> list[Any]:
        """`method` of the first ranks' workers, one for each of `arguments`."""
        self.check_alive()
        try:
            for rank, given in enumerate(arguments):
                self._send(rank, (method, given))
            answers = self._gather(range(len(arguments)), method, timeout_s)
        except TPInferenceError as error:
            self._fail(as_failure(error))
        return [answers[rank] for rank in range(len(arguments))]

    def _send(self, rank: int, call: tuple[str, Arguments]) -> None:
        try:
            self._ranks[rank].calls.send(call)
        except ConnectionError:
            self._raise_lost(rank)

    def _gather(self, ranks: Sequence[int], method: str, timeout_s: float | None) -> dict[int, Any]:
        """The first failure ends the wait: the others may wait for that rank, for good."""
        waiting = {self._ranks[rank].calls: rank for rank in ranks}
        answers: dict[int, Any] = {}
        deadline = None if timeout_s is None else Deadline.after(timeout_s)
        while waiting:
            ready = wait(list(waiting), None if deadline is None else deadline.remaining_s)
            if not ready:
                raise StepTimedOut.without(list(waiting.values()), method, timeout_s)
            for calls in ready:
                assert isinstance(calls, Connection), "only these were waited for"
                rank = waiting.pop(calls)
                answers[rank] = self._receive(rank)
        return answers

    def _receive(self, rank: int) -> Any:
        try:
            succeeded, value = self._ranks[rank].calls.recv()
        except (EOFError, ConnectionError):
            self._raise_lost(rank)
        if succeeded:
            return value
        raise value

    def _raise_lost(self, rank: int) -> NoReturn:
        """Its pipe is closed, so it is dead or about to be; killed if it is neither."""
        process = self._ranks[rank].process
        process.join(_CLOSED_S)
        self._check_rank(rank)
        process.kill()
        raise GroupFailed(f"rank {rank} closed its pipe and ran on", rank=rank)

    def _raise_reported(self, rank: int) -> None:
        """A step's error was sent before its mark was."""
        self._receive(rank)

    def _check_rank(self, rank: int) -> None:
        code = self._ranks[rank].process.exitcode
        if code is not None:
            how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
            pid = self._ranks[rank].process.pid
            raise RankDied(f"rank {rank} (pid {pid}) died: {how}", rank=rank)

    def _fail(self, error: TPInferenceError) -> NoReturn:
        if self._failure is None:
            self._failure = self._named(error)
        self._kill()
        raise self._failure

    def _named(self, error: TPInferenceError) -> TPInferenceError:
        """An error that names nobody is told by a survivor: who died may not be seen yet."""
        nameless = isinstance(error, GroupFailed) and error.rank is None
        if nameless and not isinstance(error, StepTimedOut):
            rank_of = {rank.process.sentinel: i for i, rank in enumerate(self._ranks)}
            for sentinel in wait(list(rank_of), _NAMING_S):
                assert isinstance(sentinel, int), "only these were waited for"
                try:
                    self._ranks[rank_of[sentinel]].process.join(_CLOSED_S)
                    self._check_rank(rank_of[sentinel])
                except RankDied as death:
                    return death
        return error

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
