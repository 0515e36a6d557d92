"""The example on a real node: where its ranks are, what it answers, how it goes.

The tests run in the order of this file; the last one removes what the others ask.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from embedded.demo import QUESTION
from embedded.serving import Serving
from embedded.stream import DONE, finish_reasons, open_stream
from embedded.wait import wait_for

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.async_engine import AsyncEngine
from tpinference_engine.request import Request, SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

# Of the example: updateStrategy.drainSeconds and the time that pods get beyond it.
GRACE_S = 90
NUM_TOKENS = 12
LOCAL_START_S = 120.0
# Its canary comes every 15 s, and it rests 3 s after one.
REST_TIMEOUT_S = 40


def test_two_ranks_run_in_two_pods(serving: Serving) -> None:
    status = serving.engine_status()
    pods = {pod["metadata"]["name"] for pod in serving.pods("worker")}
    assert status["state"] == "ready"
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
    assert {rank["pod"] for rank in status["ranks"]} == pods
    assert len(pods) == 2


def test_status_of_the_object_names_the_ranks_pods(serving: Serving) -> None:
    pods = {pod["metadata"]["name"] for pod in serving.pods("worker")}
    (group,) = serving.read()["status"]["groups"]
    assert {rank["pod"] for rank in group["ranks"]} == pods


def test_every_pod_passed_the_restricted_level(serving: Serving) -> None:
    pods = [*serving.pods("head"), *serving.pods("worker")]
    assert len(pods) == 3
    assert serving.condition("Ready")["status"] == "True"


def test_a_chat_answer_is_right(serving: Serving) -> None:
    assert serving.ask(QUESTION) == "The capital of France is Paris."


def test_tokens_equal_those_of_an_engine_on_this_machine(serving: Serving, model: Path) -> None:
    prompt = list(range(1000, 1012))
    body = {
        "model": serving.name,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    (choice,) = serving.post("/v1/completions", body)["choices"]
    assert choice["token_ids"] == asyncio.run(local_tokens(model, prompt))


def test_an_idle_engine_leaves_its_graph_and_answers_all_the_same(serving: Serving) -> None:
    wait_for(
        "the engine to rest",
        lambda: serving.engine_status()["stepTransport"] == "actor-call",
        timeout_s=REST_TIMEOUT_S,
        describe=serving.explain,
    )
    began = time.monotonic()
    assert serving.ask(QUESTION) == "The capital of France is Paris."
    print(f"answered {time.monotonic() - began:.1f} s after a rest")
    assert serving.engine_status()["stepTransport"] == "actor-call", "a short answer compiled"


def test_steady_state_writes_nothing(serving: Serving) -> None:
    before = serving.read()["metadata"]["resourceVersion"]
    assert serving.ask(QUESTION)
    assert serving.read()["metadata"]["resourceVersion"] == before


def test_deleted_with_streams_open_each_ends_properly(serving: Serving) -> None:
    with ask_for(serving, num_tokens=4) as short, ask_for(serving, num_tokens=1900) as long:
        short_events, long_events = [next(short)], [next(long)]
        where = ("-n", serving.namespace, "--wait=false")
        serving.kubectl("delete", "tpinference", serving.name, *where)
        deleted = time.monotonic()
        short_events += list(short)
        long_events += list(long)
    assert time.monotonic() - deleted < GRACE_S
    # What fits into the drain is finished; what does not is told so, never just cut off.
    assert (finish_reasons(short_events), short_events[-1]) == (["length"], DONE)
    assert json.loads(long_events[-1])["error"]["code"] == "engine_stopped"
    for kind in ("raycluster", "pod", "service", "controllerrevision"):
        wait_for(
            f"every {kind} to be gone",
            partial(has_no, serving, kind),
            timeout_s=GRACE_S,
            describe=serving.explain,
        )


async def local_tokens(model: Path, prompt: list[int]) -> list[int]:
    """Of one rank, in float32, without Ray or Kubernetes."""
    engine = AsyncEngine(
        EngineConfig(
            model=model,
            served_model_name=("local",),
            device="cpu",
            dtype="float32",
            max_model_len=256,
            max_num_seqs=1,
            distributed_executor_backend="uni",
        )
    )
    await engine.start(LOCAL_START_S)
    try:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        request = Request(request_id="local", prompt_token_ids=tuple(prompt), params=params)
        return [token async for output in engine.generate(request) for token in output.token_ids]
    finally:
        await engine.shutdown()


def ask_for(serving: Serving, *, num_tokens: int) -> AbstractContextManager[Iterator[str]]:
    body = {
        "model": serving.name,
        "messages": [{"role": "user", "content": "Tell a very long story of a river."}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
    }
    url = f"{serving.service_url()}/v1/chat/completions"
    return open_stream(url, body, timeout_s=GRACE_S)


def has_no(serving: Serving, kind: str) -> bool:
    selector = f"serving.tpinference.dev/name={serving.name}"
    listed = serving.kubectl("get", kind, "-n", serving.namespace, "-l", selector, "-o", "name")
    return not listed.split()
