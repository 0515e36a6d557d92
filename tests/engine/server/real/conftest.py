"""`python -m tpinference_engine serve` as a process of its own, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

_READY_TIMEOUT_S = 240.0
_POLL_S = 0.05


def free_ports(count: int) -> list[int]:
    """Held together until all are known, so that they differ."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    numbers = [bound.getsockname()[1] for bound in held]
    for bound in held:
        bound.close()
    return numbers


def command_line(pid: int) -> str:
    """Nothing for a process that is gone, or dead and not yet reaped."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[1])


def descendants(root: int) -> dict[int, str]:
    """Command lines by pid, of all that `root` started and that still has its line of parents."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    parent_of = {pid: _parent(pid) for pid in pids}
    found: dict[int, str] = {}
    for pid in pids:
        ancestor = pid
        while ancestor > 1 and ancestor != root:
            ancestor = parent_of.get(ancestor, 0)
        if ancestor == root and pid != root:
            found[pid] = command_line(pid)
    return found


def shared_memory_of(pid: int) -> set[str]:
    """Names in /dev/shm that a process has mapped or open."""
    process = Path(f"/proc/{pid}")
    try:
        used = (process / "maps").read_text().split()
        used += [os.readlink(descriptor) for descriptor in (process / "fd").iterdir()]
    except OSError:
        return set()
    return {path.removeprefix("/dev/shm/") for path in used if path.startswith("/dev/shm/")}


def shared_memory_named(pids: set[int]) -> set[str]:
    """Names in /dev/shm that have one of these pids in them, as Ray's semaphores have."""
    names = {entry.name for entry in Path("/dev/shm").iterdir()}
    return {name for name in names if pids & {int(n) for n in re.findall(r"\d+", name)}}


class ServeProcess:
    def __init__(self, process: asyncio.subprocess.Process, ports: list[int], folder: Path) -> None:
        self.process = process
        self.ports = ports
        self.folder = folder
        self._shared_memory: set[str] = set()
        self.admin = httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports[1]}", timeout=30)
        base_url = f"http://127.0.0.1:{ports[0]}/v1"
        self.client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def failure_file(self) -> Path:
        return self.folder / "failure.json"

    def children(self) -> dict[int, str]:
        """Also notes the shared memory that they use, of which none may outlive them."""
        found = descendants(self.process.pid)
        for pid in found:
            self._shared_memory |= shared_memory_of(pid)
        return found

    async def wait_ready(self) -> None:
        async def is_ready() -> bool:
            assert self.process.returncode is None, self.log
            try:
                return (await self.admin.get("/readyz")).status_code == 200
            except httpx.TransportError:
                return False

        await self.wait_until(is_ready, _READY_TIMEOUT_S)

    async def wait_until(
        self,
        holds: Callable[[], Awaitable[bool]],
        timeout_s: float,
        seen: Callable[[], object] = lambda: None,
    ) -> float:
        """How long it took."""
        began = time.monotonic()
        while not await holds():
            waited = time.monotonic() - began
            assert waited < timeout_s, f"not after {waited:.1f} s: {seen()}\n{self.log}"
            await asyncio.sleep(_POLL_S)
        return time.monotonic() - began

    async def wait_gone(self, pids: dict[int, str], timeout_s: float) -> float:
        left: dict[int, str] = {}

        async def all_gone() -> bool:
            nonlocal left
            left = {pid: line for pid, line in pids.items() if command_line(pid) == line}
            return not left

        return await self.wait_until(all_gone, timeout_s, lambda: left)

    async def exit_code(self, timeout_s: float) -> int:
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()

    async def check_nothing_left(self, pids: dict[int, str], timeout_s: float = 10) -> None:
        """No process, no port, no shared memory."""
        await self.wait_gone(pids, timeout_s)
        for port in self.ports:
            with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port)):
                pass
        left = {name for name in self._shared_memory if Path("/dev/shm", name).exists()}
        assert left | shared_memory_named(set(pids)) == set()

    async def close(self) -> None:
        """After a test that failed, nothing of it may go on."""
        left = self.children()
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        for pid, command in left.items():
            if command_line(pid) == command:
                os.kill(pid, signal.SIGKILL)
        await self.admin.aclose()
        await self.client.close()


@pytest.fixture
async def serve_process(
    smollm2_dir: Path, tmp_path: Path
) -> AsyncIterator[Callable[..., Awaitable[ServeProcess]]]:
    started: list[ServeProcess] = []

    async def start(*flags: str) -> ServeProcess:
        ports = free_ports(2)
        arguments = ["serve", str(smollm2_dir), "--served-model-name", "smollm2"]
        # float32, since "The" is ahead of "L" by 0.1 alone: less than bfloat16 can tell apart.
        arguments += ["--device", "cpu", "--dtype", "float32", "--max-model-len", "512"]
        arguments += ["--host", "127.0.0.1"]
        arguments += ["--port", str(ports[0]), "--admin-port", str(ports[1]), *flags]
        environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environ["TPINFERENCE_FAILURE_FILE"] = str(tmp_path / "failure.json")
        with (tmp_path / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tpinference_engine",
                *arguments,
                stdout=log,
                stderr=log,
                env=environ,
            )
        started.append(ServeProcess(process, ports, tmp_path))
        return started[-1]

    yield start
    for process in started:
        await process.close()


@pytest.fixture
def ask_for_paris() -> Callable[[Any], Awaitable[str]]:
    async def ask(served: ServeProcess) -> str:
        answer = await served.client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=32,
        )
        return answer.choices[0].message.content or ""

    return ask
