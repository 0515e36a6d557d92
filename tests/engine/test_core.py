"""The engine's loop: what it does with messages, when it rests, and how it ends."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import pytest

from tpinference_engine.config import EngineConfig, Transport
from tpinference_engine.engine import core as core_module
from tpinference_engine.engine.core import CANARY_ID, EngineCore
from tpinference_engine.engine.messages import (
    AbortRequest,
    AddRequest,
    CallDone,
    CallRanks,
    CoreFailed,
    CoreReady,
    CoreStopped,
    FromCore,
    Progress,
    RunCanary,
    StageBegan,
    StopCore,
    ToCore,
)
from tpinference_engine.engine.parts import EngineParts, ModelFacts
from tpinference_engine.errors import (
    GroupDiverged,
    InsufficientResources,
    InvalidConfig,
    InvalidModel,
    RankDied,
    RanksNotPlaced,
)
from tpinference_engine.executor.base import BeginStage, RankPlace
from tpinference_engine.executor.uni import UniExecutor
from tpinference_engine.request import FinishReason, Request, RequestOutput, SamplingParams
from tpinference_engine.runner.echo import EchoRunner
from tpinference_engine.step import StepInput, StepOutput

DEADLINE_S = 20.0
Message = TypeVar("Message")


class TroubledExecutor:
    """A real one that notes what is called, and fails where a test says so."""

    step_transport: Transport | None = None

    def __init__(self, config: EngineConfig) -> None:
        self._inner = UniExecutor(config, 64, EchoRunner)
        self.log: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.actions: dict[str, Callable[[], None]] = {}

    def _note(self, call: str) -> None:
        self.log.append(call)
        self.actions.get(call, lambda: None)()
        if call in self.errors:
            raise self.errors[call]

    def start(self, begin_stage: BeginStage) -> None:
        self._note("start")
        self._inner.start(begin_stage)

    @property
    def num_blocks(self) -> int:
        return self._inner.num_blocks

    @property
    def places(self) -> tuple[RankPlace, ...]:
        return self._inner.places

    def submit(self, step: StepInput) -> None:
        self._note("step" if step.forward else "flush")
        self._inner.submit(step)

    def collect(self) -> StepOutput:
        output = self._inner.collect()
        self._note(f"collect {output.step_id}")
        return output

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> list[Any]:
        self._note(method)
        return self._inner.collective_rpc(method, args, timeout_s)

    def rest(self) -> None:
        self._note("rest")

    def check_alive(self) -> None:
        self._note("check_alive")

    def shutdown(self) -> None:
        self._note("shutdown")
        self._inner.shutdown()


class Harness:
    """A core in a thread, with all it said so far."""

    def __init__(self, config: EngineConfig) -> None:
        self.executor = TroubledExecutor(config)
        self.inbox: queue.SimpleQueue[ToCore] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[FromCore] = queue.SimpleQueue()
        self.said: list[FromCore] = []
        self.succeeded: bool | None = None
        facts = ModelFacts(vocab_size=512, eos_token_ids=(), max_model_len=64)
        core = EngineCore(
            config,
            lambda _: EngineParts(executor=self.executor, model=facts),
            max_requests=8,
            inbox=self.inbox,
            emit=self.outbox.put,
        )

        def run() -> None:
            self.succeeded = core.run()

        self.thread = threading.Thread(target=run)

    def start(self) -> Harness:
        self.thread.start()
        self.until(CoreReady)
        return self

    def send(self, *messages: ToCore) -> None:
        for message in messages:
            self.inbox.put(message)

    def until(
        self, kind: type[Message], holds: Callable[[Message], bool] = lambda message: True
    ) -> Message:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                message = self.outbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"no such {kind.__name__}; the core said {self.said[-9:]}")
            self.said.append(message)
            if isinstance(message, kind) and holds(message):
                return message

    def outputs(self) -> list[RequestOutput]:
        return [o for m in self.said if isinstance(m, Progress) for o in m.outputs]

    def until_finished(self, request_id: str) -> FinishReason | None:
        """Also if it has been heard already."""
        while not any(_ends(output, request_id) for output in self.outputs()):
            self.until(Progress)
        return next(o.finish_reason for o in self.outputs() if _ends(o, request_id))

    def join(self) -> None:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive(), "the core did not end"


def _ends(output: RequestOutput, request_id: str) -> bool:
    return output.request_id == request_id and output.finish_reason is not None


def add(name: str, max_tokens: int = 3) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return AddRequest(Request(request_id=name, prompt_token_ids=(1, 2), params=params))


@pytest.fixture
def harness(make_config: Callable[..., EngineConfig]) -> Iterator[Harness]:
    config = make_config(distributed_executor_backend="uni", max_num_seqs=2, max_model_len=64)
    with ExitStack() as stack:
        harness = Harness(config)

        def end() -> None:
            if harness.thread.ident is not None:
                harness.send(StopCore())
                harness.join()

        stack.callback(end)
        yield harness


def test_a_core_says_its_stages_then_its_limits_then_tokens(harness: Harness) -> None:
    harness.start()
    harness.send(add("a"))
    assert harness.until_finished("a") is FinishReason.LENGTH
    stages = [m for m in harness.said if isinstance(m, StageBegan)]
    assert [stage.name for stage in stages] == ["weightsLoaded", "warmedUp"]
    assert stages[0].elapsed_s <= stages[1].elapsed_s
    ready = next(m for m in harness.said if isinstance(m, CoreReady))
    assert ready.limits.max_model_len == 64
    assert [place.rank for place in ready.places] == [0]


def test_an_idle_core_submits_nothing_and_looks_after_its_ranks(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_module, "IDLE_TICK_S", 0.01)
    harness.start()
    for _ in range(3):
        harness.until(Progress)
    assert set(harness.executor.log) == {"start", "check_alive"}
    harness.send(add("a"))
    harness.until_finished("a")
    steps = [call for call in harness.executor.log if call in ("step", "flush")]
    assert steps == ["step", "step", "step", "flush"]


def test_a_rank_that_dies_while_idle_fails_the_engine(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_module, "IDLE_TICK_S", 0.01)
    harness.executor.errors["check_alive"] = RankDied("rank 0 exited with 9", rank=0)
    harness.start()
    failure = harness.until(CoreFailed).failure
    assert (failure.reason, failure.rank) == ("GroupFailed", 0)


def test_an_idle_engine_rests_and_not_before_it_has_been_idle_for_a_while(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    rested = threading.Event()
    harness.executor.actions["rest"] = rested.set
    monkeypatch.setattr(core_module, "IDLE_TICK_S", 0.01)
    monkeypatch.setattr(core_module, "REST_AFTER_S", 0.2)
    harness.start()
    harness.send(add("a"))
    harness.until_finished("a")
    ended_at = time.monotonic()
    assert rested.wait(5)
    assert time.monotonic() - ended_at > 0.15


@pytest.mark.parametrize("call", ["step", "collect 2", "flush"])
def test_a_group_that_fails_ends_every_request_with_the_reason(harness: Harness, call: str) -> None:
    error = GroupDiverged("step 2: rank 0 acknowledged token CRC 1, rank 1 2", rank=0)
    harness.executor.errors[call] = error
    harness.start()
    harness.send(add("a"), add("b"), add("waiting"))
    failure = harness.until(CoreFailed).failure
    endings = {o.request_id: o for o in harness.outputs() if o.finish_reason}
    assert sorted(endings) == ["a", "b", "waiting"]
    assert {(o.finish_reason, o.error) for o in endings.values()} == {
        (FinishReason.ERROR, str(error))
    }
    assert (failure.reason, failure.rank, failure.message) == ("GroupFailed", 0, str(error))
    assert failure.pod == harness.executor.places[0].pod
    harness.until(CoreStopped)
    harness.join()
    assert harness.succeeded is False
    assert harness.executor.log[-1] == "shutdown"


def test_an_error_of_our_own_is_a_crash_and_says_what_it_was(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.executor.errors["step"] = ZeroDivisionError("oh")
    harness.start()
    harness.send(add("a"))
    assert harness.until_finished("a") is FinishReason.ERROR
    failure = harness.until(CoreFailed).failure
    assert (failure.reason, failure.message) == ("EngineCrashed", "ZeroDivisionError: oh")
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InvalidConfig("x"), "InvalidConfig"),
        (InvalidModel("x"), "InvalidModel"),
        (InsufficientResources("x"), "InsufficientResources"),
        (RanksNotPlaced("x"), "RanksNotPlaced"),
        (RankDied("x"), "GroupFailed"),
        (RuntimeError("x"), "EngineCrashed"),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_no_rank(
    harness: Harness, error: Exception, reason: str
) -> None:
    harness.executor.errors["start"] = error
    harness.thread.start()
    assert harness.until(CoreFailed).failure.reason == reason
    harness.until(CoreStopped)
    harness.join()
    assert harness.executor.log == ["start", "shutdown"]
    assert harness.succeeded is False


def test_a_cache_that_holds_no_request_of_full_length_is_a_wrong_setting(
    make_config: Callable[..., EngineConfig],
) -> None:
    config = make_config(distributed_executor_backend="uni", num_gpu_blocks_override=15)
    harness = Harness(config)
    harness.thread.start()
    failure = harness.until(CoreFailed).failure
    assert failure.reason == "InvalidConfig"
    assert "num_blocks is 15" in failure.message and "max_model_len 64" in failure.message
    harness.join()


def test_a_call_to_the_ranks_waits_for_a_flush(harness: Harness) -> None:
    call = CallRanks(1, "idle", (), None)
    harness.executor.actions["collect 2"] = lambda: harness.send(call)
    harness.start()
    harness.send(add("a", max_tokens=5))
    assert harness.until(CallDone) == CallDone(1, (None,))
    assert harness.until_finished("a") is FinishReason.LENGTH
    calls = [call for call in harness.executor.log if not call.startswith("collect")]
    before = ["start", "step", "step", "step", "flush"]
    assert calls == [*before, "idle", "step", "step", "flush"]


def test_a_call_that_is_refused_is_answered_and_the_engine_lives(harness: Harness) -> None:
    harness.start()
    harness.send(CallRanks(1, "no_such_method", (), None), CallRanks(2, "_sample", (), None))
    for call_id, name in ((1, "no_such_method"), (2, "_sample")):
        done = harness.until(CallDone)
        assert done.call_id == call_id
        assert f"method is '{name}'" in str(done.error)
    harness.send(add("a"))
    assert harness.until_finished("a") is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("method", "args"),
    [
        pytest.param("initialize", (7, 0), id="for a wrong argument"),
        pytest.param("allocate_cache", ("many",), id="by a bug"),
    ],
)
def test_a_call_that_a_rank_fails_in_fails_the_engine(
    harness: Harness, method: str, args: tuple[object, ...]
) -> None:
    harness.start()
    harness.send(CallRanks(1, method, args, None))
    assert harness.until(CoreFailed).failure.reason == "GroupFailed"


def test_a_canary_on_an_idle_engine_runs_one_token_and_shows_no_output(harness: Harness) -> None:
    harness.start()
    harness.send(RunCanary(5))
    assert harness.until(CallDone) == CallDone(5)
    harness.until(Progress, lambda p: p.requests.running == 0)
    steps = [call for call in harness.executor.log if call in ("step", "flush")]
    assert steps == ["step", "flush"]
    outputs = harness.outputs()
    assert outputs == []


def test_a_canary_on_a_full_engine_needs_no_slot(harness: Harness) -> None:
    harness.start()
    harness.send(add("a", 50), add("b", 50), add("waiting", 50), RunCanary(5))
    harness.until(CallDone, lambda done: done.call_id == 5)
    outputs = harness.outputs()
    assert not any(o.finish_reason or o.request_id == CANARY_ID for o in outputs)


def test_an_abort_is_answered_once(harness: Harness) -> None:
    harness.start()
    harness.send(add("a", 50), AbortRequest("a"), AbortRequest("a"), add("b"))
    assert harness.until_finished("a") is FinishReason.ABORT
    assert harness.until_finished("b") is FinishReason.LENGTH
    outputs = harness.outputs()
    assert sum(_ends(o, "a") for o in outputs) == 1


def test_a_request_that_was_sent_twice_gets_an_error_for_one(harness: Harness) -> None:
    harness.start()
    harness.send(add("a"), add("a"))
    progress = harness.until(Progress, lambda p: bool(p.outputs))
    assert progress.outputs[0].finish_reason is FinishReason.ERROR
    assert "is in use already" in str(progress.outputs[0].error)
    assert harness.until_finished("a")


def test_a_stop_aborts_what_is_left_and_shuts_the_ranks_down(harness: Harness) -> None:
    harness.start()
    harness.send(add("a", 60), StopCore())
    assert harness.until_finished("a") is FinishReason.ABORT
    harness.until(CoreStopped)
    harness.join()
    assert harness.succeeded is True
    assert harness.executor.log[-1] == "shutdown"


def test_a_shutdown_that_fails_still_ends_the_core(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.executor.errors["shutdown"] = RuntimeError("teardown hangs")
    harness.start()
    harness.send(StopCore())
    harness.until(CoreStopped)
    harness.join()
    assert "teardown hangs" in caplog.text
