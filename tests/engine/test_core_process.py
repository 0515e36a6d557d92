"""The core's process ends with its parent, however that dies, and can be ended while it starts."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine import process as process_module
from tpinference_engine.engine.async_engine import AsyncEngine
from tpinference_engine.engine.core_process import ORPHAN_GRACE_S
from tpinference_engine.engine.parts import build_echo_parts
from tpinference_engine.engine.process import ProcessLink
from tpinference_engine.errors import EngineStopped, StartupTimedOut
from tpinference_engine.request import FinishReason, Request, SamplingParams

ORPHAN_DEADLINE_S = ORPHAN_GRACE_S + 5.0

PARENT = '''
import asyncio, sys, time
from pathlib import Path

from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.async_engine import AsyncEngine
from tpinference_engine.engine.parts import build_echo_parts
from tpinference_engine.request import Request, SamplingParams


def hang(config):
    """A start that never ends: it holds the loop's thread."""
    while True:
        time.sleep(3600)


def die(config):
    import os
    os._exit(7)


def answer_what_cannot_be_sent(config):
    parts = build_echo_parts(config)
    parts.executor.collective_rpc = lambda *_: [object()]
    return parts


def main(build):
    config = EngineConfig(
        model=Path("none"), served_model_name=("echo",), device="cpu",
        distributed_executor_backend="uni", max_model_len=100000, num_gpu_blocks_override=10000,
    )
    asyncio.run(serve(AsyncEngine(config, build=build)))


async def serve(engine):
    starting = asyncio.create_task(engine.start())
    while engine._link.pid is None:
        await asyncio.sleep(0)
    print(engine._link.pid, flush=True)
    await starting
    params = SamplingParams(max_tokens=90000, temperature=0.0)
    stream = engine.generate(Request(request_id="a", prompt_token_ids=(1,), params=params))
    await anext(stream)
    print("busy", flush=True)
    await asyncio.sleep(3600)
'''


@pytest.fixture
def parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module that this process, a parent of ours and its child can all import."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "parent_module.py").write_text(PARENT)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def start_parent(
    parents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    started: list[subprocess.Popen[str]] = []

    def start(build: str) -> subprocess.Popen[str]:
        program = f"import parent_module; parent_module.main(parent_module.{build})"
        parent = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
        )
        started.append(parent)
        return parent

    yield start
    for parent in started:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()


@pytest.fixture
async def start_engine(
    make_config: Callable[..., EngineConfig],
) -> AsyncIterator[Callable[[], Awaitable[AsyncEngine]]]:
    engines: list[AsyncEngine] = []

    async def start() -> AsyncEngine:
        config = make_config(distributed_executor_backend="uni")
        engines.append(AsyncEngine(config, build=build_echo_parts))
        await engines[-1].start(20)
        return engines[-1]

    yield start
    for engine in engines:
        await engine.shutdown()


def read_line(parent: subprocess.Popen[str]) -> str:
    assert parent.stdout is not None
    return parent.stdout.readline().strip()


def wait_gone(pidfd: int, timeout_s: float) -> float:
    """A process's descriptor is readable once it has ended; the time that took."""
    began = time.monotonic()
    ready, _, _ = select.select([pidfd], [], [], timeout_s)
    assert ready, f"the core lives {timeout_s:g} s after its parent"
    return time.monotonic() - began


def broken_join(timeout: float | None = None) -> None:
    raise RuntimeError("no")


def core_pid(engine: AsyncEngine) -> int:
    pid = cast(ProcessLink, engine._link).pid
    assert pid is not None
    return pid


@pytest.mark.parametrize("build", ["build_echo_parts", "hang"])
def test_an_orphan_ends_by_itself_busy_or_stuck(
    start_parent: Callable[[str], subprocess.Popen[str]], tmp_path: Path, build: str
) -> None:
    parent = start_parent(build)
    pidfd = os.pidfd_open(int(read_line(parent)))
    try:
        if build != "hang":
            assert read_line(parent) == "busy"
        parent.send_signal(signal.SIGKILL)
        wait_gone(pidfd, ORPHAN_DEADLINE_S)
    finally:
        os.close(pidfd)
    assert [entry.name for entry in tmp_path.iterdir()] == ["modules"], "sockets are left"


async def test_a_start_that_hangs_is_ended_by_force(
    parents: Path, make_config: Callable[..., EngineConfig]
) -> None:
    import parent_module  # type: ignore[import-not-found]

    engine = AsyncEngine(make_config(distributed_executor_backend="uni"), build=parent_module.hang)
    with pytest.raises(StartupTimedOut):
        await engine.start(0.5)
    async with asyncio.timeout(5):
        await engine.shutdown()
    assert engine.status().reason == "StartupTimedOut"


async def test_a_core_that_dies_in_its_start_says_so_by_its_exit_code(
    parents: Path, make_config: Callable[..., EngineConfig]
) -> None:
    import parent_module

    engine = AsyncEngine(make_config(distributed_executor_backend="uni"), build=parent_module.die)
    with pytest.raises(EngineStopped, match="the engine core process exited 7"):
        await engine.start(20)
    failure = engine.status().last_failure
    assert failure is not None
    assert (failure.reason, failure.exit_code) == ("EngineCrashed", 7)
    await engine.shutdown()


async def test_a_core_that_can_not_say_what_it_wants_to_ends_as_a_failure(
    parents: Path, make_config: Callable[..., EngineConfig]
) -> None:
    import parent_module

    engine = AsyncEngine(
        make_config(distributed_executor_backend="uni"),
        build=parent_module.answer_what_cannot_be_sent,
    )
    await engine.start(20)
    try:
        async with asyncio.timeout(ORPHAN_DEADLINE_S):
            with pytest.raises(EngineStopped, match="the engine core process exited 1"):
                await engine.collective_rpc("place")
        assert engine.status().reason == "EngineCrashed"
    finally:
        await engine.shutdown()


async def test_a_core_that_can_not_take_a_message_in_ends_as_a_failure(
    start_engine: Callable[[], Awaitable[AsyncEngine]],
) -> None:
    engine = await start_engine()
    cast(ProcessLink, engine._link)._to_core.send(b"no message")
    async with asyncio.timeout(ORPHAN_DEADLINE_S):
        failure = await engine.wait_failed()
    assert (failure.reason, failure.exit_code) == ("EngineCrashed", 1)


async def test_a_parent_that_can_not_take_a_message_in_fails_the_engine(
    start_engine: Callable[[], Awaitable[AsyncEngine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start_engine()
    pid = core_pid(engine)

    def hear(message: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(engine._board, "hear", hear)
    stream = engine.generate(
        Request(request_id="a", prompt_token_ids=(1,), params=SamplingParams(max_tokens=9))
    )
    async with asyncio.timeout(ORPHAN_DEADLINE_S):
        failure = await engine.wait_failed()
        ending = await anext(stream)
        await engine.shutdown()
    assert (failure.reason, failure.message) == ("EngineCrashed", "RuntimeError: a bug of ours")
    assert ending.finish_reason is FinishReason.ERROR
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("part", ["stdin", "directory", "thread"])
async def test_an_exit_is_told_whatever_can_not_be_cleared_away(
    start_engine: Callable[[], Awaitable[AsyncEngine]], part: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await start_engine()
    link = cast(ProcessLink, engine._link)
    pid = core_pid(engine)
    if part == "stdin":
        assert link._process is not None and link._process.stdin is not None
        link._process.stdin.write(b"left in the buffer")
    elif part == "directory":
        shutil.rmtree(link._directory)
    else:
        link._waiter.join = broken_join  # type: ignore[method-assign]
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(ORPHAN_DEADLINE_S):
        failure = await engine.wait_failed()
        await engine.shutdown()
    assert failure.exit_code == -signal.SIGKILL
    assert not link._directory.exists()


async def test_a_killed_core_that_is_not_gone_is_not_waited_for_without_end(
    start_engine: Callable[[], Awaitable[AsyncEngine]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = await start_engine()
    link = cast(ProcessLink, engine._link)
    monkeypatch.setattr(process_module, "KILL_TIMEOUT_S", 0.05)
    with monkeypatch.context() as stuck:
        stuck.setattr(link._process, "kill", lambda: None)
        stuck.setattr(link, "_try_send", lambda _: True)
        async with asyncio.timeout(5):
            await link.close(0.05)
    assert f"engine core process {link.pid} is not gone" in caplog.text
    await link.close(20)
    assert not Path(f"/proc/{link.pid}").exists()
