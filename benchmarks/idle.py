"""What an idle engine costs, and what its first token after idling waits for.

    python benchmarks/idle.py --model MODEL_DIR

A real engine under ray, its ranks on the driver's raylet and on another one. Busy waiting is the
processor time of the engine core and all ranks, in percent of one core, over a window: right after
a request, once the engine rests, and at rest with a canary every two seconds. Goals: below 3 % at
rest; the first token within 150 ms and a step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from step_benchmark.processes import ENGINE_CORE, children_that_run
from step_benchmark.raylets import RayletGroup

from tpinference_engine.bench.engine_run import make_requests, running_engine
from tpinference_engine.config import EngineConfig
from tpinference_engine.engine.async_engine import AsyncEngine
from tpinference_engine.engine.core import REST_AFTER_S

_SECONDS_PER_TICK = 1 / os.sysconf("SC_CLK_TCK")
_PROMPT = tuple(range(100, 116))
_CANARY_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Row:
    placement: str
    tp: int
    waiting_percent: float
    """Right after a request, before the engine rests."""
    resting_percent: float
    canary_percent: float
    """At rest, with canaries: their steps are in it."""
    first_token_ms: float
    """The slowest of some, each after a rest."""
    step_ms: float
    longest_gap_ms: float
    """Between two tokens of a request that is long enough to bring the graph back."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, metavar="MODEL_DIR")
    parser.add_argument("--tensor-parallel-size", type=int, default=2, metavar="N")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--window", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--rounds", type=int, default=5, help="first tokens that are measured")
    parser.add_argument("--output-len", type=int, default=640, help="of the lasting request")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [measure(placement, args) for placement in ("same", "across")]
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2))
        return
    names = list(asdict(rows[0]))
    print("  ".join(names))
    for row in rows:
        values = asdict(row).values()
        cells = [f"{v:.1f}" if isinstance(v, float) else str(v) for v in values]
        print("  ".join(cell.rjust(len(name)) for cell, name in zip(cells, names, strict=True)))


def measure(placement: str, args: argparse.Namespace) -> Row:
    gpus = args.tensor_parallel_size if args.device == "cuda" else 0
    raylets = RayletGroup(placement, args.tensor_parallel_size, gpus)  # type: ignore[arg-type]
    config = EngineConfig(
        model=args.model,
        served_model_name=("model",),
        device=args.device,
        dtype=args.dtype,
        tensor_parallel_size=args.tensor_parallel_size,
        max_model_len=2048,
        max_num_seqs=8,
        ray_address=raylets.address,
    )
    try:
        return asyncio.run(_measure(config, placement, args))
    finally:
        raylets.close()


async def _measure(config: EngineConfig, placement: str, args: argparse.Namespace) -> Row:
    async with running_engine(config, max_requests=8) as engine:
        pids = children_that_run(ENGINE_CORE)
        pids += [place["pid"] for place in await engine.collective_rpc("place")]
        gaps = await _token_gaps(engine, args.output_len, "warm-up")
        waiting = await _percent_of_a_core(pids, asyncio.sleep(REST_AFTER_S / 2))
        await asyncio.sleep(REST_AFTER_S)
        resting = await _percent_of_a_core(pids, asyncio.sleep(args.window))
        canary = await _percent_of_a_core(pids, _send_canaries(engine, args.window))
        firsts = []
        for number in range(args.rounds):
            await asyncio.sleep(REST_AFTER_S + 1.5)
            firsts.append((await _token_gaps(engine, 2, f"first-{number}"))[0])
        lasting = await _token_gaps(engine, args.output_len, "lasting")
    return Row(
        placement,
        config.tensor_parallel_size,
        waiting_percent=waiting,
        resting_percent=resting,
        canary_percent=canary,
        first_token_ms=1e3 * max(firsts),
        step_ms=1e3 * sorted(gaps)[len(gaps) // 2],
        longest_gap_ms=1e3 * max(lasting[1:]),
    )


async def _token_gaps(engine: AsyncEngine, output_len: int, name: str) -> list[float]:
    """Seconds to each token from the one before it, to the first from the request."""
    (request,) = make_requests([_PROMPT], output_len, name=name)
    gaps, before = [], time.monotonic()
    async for output in engine.generate(request):
        if output.token_ids:
            gaps.append(time.monotonic() - before)
            before = time.monotonic()
    return gaps


async def _send_canaries(engine: AsyncEngine, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await engine.canary(10.0)
        await asyncio.sleep(_CANARY_EVERY_S)


async def _percent_of_a_core(pids: Sequence[int], meanwhile: Awaitable[None]) -> float:
    began, before = time.monotonic(), _used_s(pids)
    await meanwhile
    return 100 * (_used_s(pids) - before) / (time.monotonic() - began)


def _used_s(pids: Sequence[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks * _SECONDS_PER_TICK


if __name__ == "__main__":
    main()
