"""One rank in this thread: its faults are the group's, and its messages are real bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tpinference_engine.config import EngineConfig
from tpinference_engine.errors import GroupFailed, InvalidConfig, MessageCorrupt, RankDied
from tpinference_engine.executor.uni import UniExecutor
from tpinference_engine.runner.base import PendingTokens, Runner
from tpinference_engine.runner.echo import EchoRunner
from tpinference_engine.step import BlockAppend, ForwardRow, NewSlot, StepInput
from tpinference_engine.worker import Worker

MAX_MODEL_LEN = 16
FLUSH = StepInput(0, 0, 0)


class BrokenRunner(EchoRunner):
    def enqueue(self, step: StepInput) -> PendingTokens:  # type: ignore[override]
        raise RuntimeError("device-side assert")


@pytest.fixture
def start(make_config: Callable[..., EngineConfig]) -> Callable[..., UniExecutor]:
    def make(runner: Callable[[EngineConfig], Runner] = EchoRunner, **changes: int) -> UniExecutor:
        config = make_config(
            distributed_executor_backend="uni",
            max_num_batched_tokens=8,
            **{"max_num_seqs": 8, **changes},
        )
        executor = UniExecutor(config, MAX_MODEL_LEN, runner)
        executor.start(lambda stage: None)
        return executor

    return make


def test_it_has_one_place_and_the_blocks_that_fit(start: Callable[..., UniExecutor]) -> None:
    assert [place.rank for place in start().places] == [0]
    assert start().num_blocks == 64
    assert start(num_gpu_blocks_override=5).num_blocks == 5


def test_an_error_of_the_runner_is_the_groups(start: Callable[..., UniExecutor]) -> None:
    executor = start(BrokenRunner)
    with pytest.raises(GroupFailed, match="rank 0 failed.*: RuntimeError: device-side"):
        executor.submit(FLUSH)


def test_a_step_of_another_epoch_is_refused(start: Callable[..., UniExecutor]) -> None:
    executor = start(epoch=2)
    with pytest.raises(MessageCorrupt, match="step 0 is of epoch 1, this rank of 2"):
        executor.submit(StepInput(0, 1, 0))


def test_a_step_that_outgrows_its_channel_is_not_sent(start: Callable[..., UniExecutor]) -> None:
    executor = start(max_num_seqs=1)
    step = StepInput(
        0,
        0,
        8,
        new=(NewSlot(0, 1, 9, 0.0, 1.0, 0, 0),),
        appends=(BlockAppend(0, tuple(range(40))),),
        forward=(ForwardRow(0, 1, 0, 8, (1,) * 8, False),),
    )
    with pytest.raises(MessageCorrupt, match="its channel holds"):
        executor.submit(step)


def test_one_step_is_in_flight_at_most(start: Callable[..., UniExecutor]) -> None:
    executor = start()
    executor.submit(FLUSH)
    with pytest.raises(AssertionError, match="while another is in flight"):
        executor.submit(FLUSH)
    assert executor.collect().step_id == 0
    with pytest.raises(AssertionError, match="no step is in flight"):
        executor.collect()


@pytest.mark.parametrize("method", ["nothing", "_check_turn", "__init__", ""])
def test_only_public_methods_of_the_worker_may_be_called(
    start: Callable[..., UniExecutor], method: str
) -> None:
    executor = start()
    with pytest.raises(InvalidConfig, match=f"method is '{method}'"):
        executor.collective_rpc(method)
    executor.submit(FLUSH)


def test_a_call_that_the_rank_fails_in_is_the_groups(start: Callable[..., UniExecutor]) -> None:
    with pytest.raises(GroupFailed, match=r"rank 0 failed: TypeError: .*") as raised:
        start().collective_rpc("allocate_cache", ("many",))
    assert raised.value.rank == 0
    with pytest.raises(GroupFailed, match="initialize failed on a rank: InvalidConfig: rank is 7"):
        start().collective_rpc("initialize", (7, 0))


def test_no_call_passes_a_step_in_flight(start: Callable[..., UniExecutor]) -> None:
    executor = start()
    executor.submit(FLUSH)
    with pytest.raises(AssertionError, match="an RPC is fenced"):
        executor.collective_rpc("idle")


def test_the_process_of_the_rank_is_settled_by_its_owner(
    start: Callable[..., UniExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle(worker: Worker) -> None:
        pytest.fail("it would freeze every object of the core's process, or of this one")

    monkeypatch.setattr(Worker, "settle", settle)
    start()


def test_after_shutdown_it_is_a_dead_rank(start: Callable[..., UniExecutor]) -> None:
    executor = start()
    executor.check_alive()
    executor.shutdown()
    executor.shutdown()
    for call in (executor.check_alive, partial(executor.submit, FLUSH)):
        with pytest.raises(RankDied, match="rank 0 is not running"):
            call()
