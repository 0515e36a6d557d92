"""The worker's own rules: whose turn it is, and what it acknowledges."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpinference_engine.config import EngineConfig
from tpinference_engine.errors import GroupFailed, InvalidConfig, MessageCorrupt, TPInferenceError
from tpinference_engine.runner.base import RunnerFactory
from tpinference_engine.step import (
    NO_STEP,
    BlockAppend,
    ForwardRow,
    NewSlot,
    SampleRow,
    StepInput,
    decode_output,
    encode_input,
)
from tpinference_engine.worker import Worker


@pytest.fixture
def make_worker(
    make_config: Callable[..., EngineConfig], echo_runner: RunnerFactory
) -> Callable[..., Worker]:
    def make(rank: int = 0, epoch: int = 7) -> Worker:
        worker = Worker(make_config(tensor_parallel_size=2), echo_runner)
        worker.initialize(rank, epoch)
        worker.allocate_cache(8)
        return worker

    return make


def flush(step_id: int, epoch: int = 7) -> bytes:
    return encode_input(StepInput(step_id=step_id, epoch=epoch, bucket=0))


def first_step() -> bytes:
    return encode_input(
        StepInput(
            step_id=0,
            epoch=7,
            bucket=4,
            new=(NewSlot(1, 5, 3, 0.0, 1.0, 0, 0),),
            appends=(BlockAppend(1, (2,)),),
            forward=(ForwardRow(1, 5, 0, 3, (1, 2, 3), True),),
        )
    )


def sampling_step() -> bytes:
    return encode_input(StepInput(step_id=1, epoch=7, bucket=0, sample=(SampleRow(1, 5, 3),)))


def test_rank_0_returns_the_tokens_of_the_previous_step(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    before = decode_output(worker.step(first_step()))
    assert (before.sampled_step_id, before.tokens) == (NO_STEP, ())
    after = decode_output(worker.step(sampling_step()))
    assert (after.step_id, after.epoch, after.rank, after.sampled_step_id) == (1, 7, 0, 0)
    (token,) = after.tokens
    assert (token.slot, token.generation, token.position) == (1, 5, 3)
    assert after.crc == zlib.crc32(np.array([token.token], dtype=np.int32).tobytes())


def test_other_ranks_only_acknowledge_with_the_same_crc(make_worker: Callable[..., Worker]) -> None:
    leader, follower = make_worker(0), make_worker(1)
    answers = []
    for worker in (leader, follower):
        worker.step(first_step())
        answers.append(decode_output(worker.step(sampling_step())))
    assert answers[0].crc == answers[1].crc
    assert answers[1].tokens == ()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (flush(2, epoch=6), "step 2 is of epoch 6, this rank of 7"),
        (flush(1), "step 1 follows step 1, must be its successor"),
        (flush(3), "step 3 follows step 1"),
        (flush(2)[:-4], "ends at word"),
        (b"", "no run of 32-bit words"),
    ],
    ids=["another epoch", "a repeated step", "a skipped step", "a cut message", "no message"],
)
def test_message_out_of_turn_is_refused(
    make_worker: Callable[..., Worker], payload: bytes, message: str
) -> None:
    worker = make_worker()
    worker.step(flush(1))
    with pytest.raises(MessageCorrupt, match=message):
        worker.step(payload)
    assert decode_output(worker.step(flush(2))).step_id == 2


def test_failed_step_can_not_be_repeated(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    bad = encode_input(StepInput(step_id=0, epoch=7, bucket=0, free=(3,)))
    with pytest.raises(MessageCorrupt, match="slot 3 is freed"):
        worker.step(bad)
    with pytest.raises(MessageCorrupt, match="must be its successor"):
        worker.step(first_step())


def test_error_of_a_rank_names_it(make_worker: Callable[..., Worker]) -> None:
    bad = encode_input(StepInput(step_id=0, epoch=7, bucket=0, free=(3,)))
    with pytest.raises(MessageCorrupt, match="slot 3 is freed") as caught:
        make_worker(1).step(bad)
    assert caught.value.rank == 1


def test_bug_in_a_step_is_a_failure_of_this_rank(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(1)

    def fail(step: StepInput) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(worker._runner, "enqueue", fail)
    with pytest.raises(GroupFailed, match="rank 1 failed: ZeroDivisionError: a bug") as caught:
        worker.step(flush(0))
    assert caught.value.rank == 1


def test_survivor_of_a_real_group_names_nobody(
    tiny_model: Callable[[str], Path], make_config: Callable[..., EngineConfig], make_driver: Any
) -> None:
    config = make_config(model=tiny_model("llama-9-heads-3-kv"), tensor_parallel_size=2)
    survivor, lost = make_driver(config).workers
    lost.close()
    prefill = StepInput(
        step_id=0,
        epoch=survivor._epoch,
        bucket=3,
        new=(NewSlot(1, 5, 3, 0.0, 1.0, 0, 0),),
        appends=(BlockAppend(1, (2,)),),
        forward=(ForwardRow(1, 5, 0, 3, (1, 2, 3), True),),
    )
    # What the first call queued is waited for in the second.
    sample = StepInput(step_id=1, epoch=survivor._epoch, bucket=0, sample=(SampleRow(1, 5, 3),))
    with pytest.raises(TPInferenceError) as caught:
        survivor.step(encode_input(prefill))
        survivor.step(encode_input(sample))
    assert isinstance(caught.value, GroupFailed) and caught.value.rank is None
    assert "gloo" in str(caught.value)


def test_step_before_initialize_is_refused(
    make_config: Callable[..., EngineConfig], echo_runner: RunnerFactory
) -> None:
    with pytest.raises(MessageCorrupt, match="before the rank was initialized"):
        Worker(make_config(), echo_runner).step(flush(0))


def test_rank_outside_of_the_group_is_refused(make_worker: Callable[..., Worker]) -> None:
    with pytest.raises(InvalidConfig, match="rank is 2"):
        make_worker(2)


def test_place_names_what_the_driver_needs(make_worker: Callable[..., Any]) -> None:
    place = make_worker().place()
    assert place["device"] == "cpu"
    assert set(place) == {"pod", "node", "address", "device", "pid"}
