"""Decode, first token and throughput of the real engine on one GPU, at Llama-3.1-8B's shapes.

Weights are random and made here (16 GB; `--model` names a directory to keep them in). **A step is
the slope**: what 128 more output tokens of a batch take, over 128, so that neither the prompt nor
the start is in it. Run it as `python benchmarks/gpu_decode.py [--backends uni ray] [--json FILE]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpinference_engine.bench.engine_run import read_to_end
from tpinference_engine.config import Backend, EngineConfig
from tpinference_engine.engine.async_engine import AsyncEngine
from tpinference_engine.request import Request, SamplingParams

BATCHES = (1, 8, 64, 256)
INPUT_LEN = 128
OUTPUT_LENS = (128, 256)
TTFT_LENS = (512, 4096)
THROUGHPUT = (512, 512, 128)
"""Requests, their prompt and their output."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128009,
    "hidden_act": "silu",
}


@dataclass(frozen=True)
class Step:
    batch: int
    ms: float
    ms_minimum: float
    latencies_s: dict[int, list[float]]


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, mlp = config["hidden_size"], config["intermediate_size"]
    kv = width // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (mlp, width),
        "mlp.up_proj": (mlp, width),
        "mlp.down_proj": (width, mlp),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    whole = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "lm_head.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    layers = range(config["num_hidden_layers"])
    return whole | {
        f"model.layers.{i}.{name}.weight": shape for i in layers for name, shape in layer.items()
    }


def make_model(directory: Path) -> None:
    """Random weights, one file a tensor's first name part; nothing if they are there."""
    import torch
    from safetensors.torch import save_file

    index = directory / "model.safetensors.index.json"
    if index.exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, Any]] = {}
    weight_map: dict[str, str] = {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, shape in tensor_shapes(CONFIG).items():
        made = torch.randn(shape, dtype=torch.bfloat16, device=device)
        made = made * shape[-1] ** -0.5 if len(shape) > 1 else made * 0 + 1
        file = ".".join(name.split(".")[:3]) + ".safetensors"
        files.setdefault(file, {})[name] = made.cpu()
        weight_map[name] = file
    for file, tensors in files.items():
        save_file(tensors, directory / file)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    index.write_text(json.dumps({"weight_map": weight_map}))


class Load:
    """Batches of random prompts, no two alike, so that no prefix is found again."""

    def __init__(self, engine: AsyncEngine, temperature: float) -> None:
        self._engine = engine
        self._temperature = temperature
        self._source = random.Random(0)
        self._count = 0

    def request(self, input_len: int, output_len: int) -> Request:
        self._count += 1
        prompt = tuple(self._source.randrange(100000) for _ in range(input_len))
        params = SamplingParams(
            max_tokens=output_len, temperature=self._temperature, ignore_eos=True
        )
        return Request(request_id=str(self._count), prompt_token_ids=prompt, params=params)

    async def run(self, count: int, input_len: int, output_len: int) -> float:
        requests = [self.request(input_len, output_len) for _ in range(count)]
        began = time.perf_counter()
        streams = [self._engine.generate(request) for request in requests]
        await asyncio.gather(*map(read_to_end, streams))
        return time.perf_counter() - began


async def measure_step(load: Load, batch: int, repeats: int) -> Step:
    found: dict[int, list[float]] = {length: [] for length in OUTPUT_LENS}
    for _ in range(repeats):
        for length in OUTPUT_LENS:
            found[length].append(await load.run(batch, INPUT_LEN, length))
    short, long = OUTPUT_LENS
    slopes = [
        (b - a) / (long - short) * 1e3 for a, b in zip(found[short], found[long], strict=True)
    ]
    return Step(batch, statistics.median(slopes), min(slopes), found)


async def measure_prompts(load: Load, repeats: int) -> dict[str, Any]:
    """Where prompts count: time to the first token, and output tokens of many requests."""
    ttft_ms = {}
    for length in TTFT_LENS:
        times = [await load.run(1, length, 1) for _ in range(repeats + 1)]
        ttft_ms[length] = statistics.median(times[1:]) * 1e3
    count, input_len, output_len = THROUGHPUT
    took = await load.run(count, input_len, output_len)
    return {"ttft_ms": ttft_ms, "output_tokens_per_s": count * output_len / took}


async def measure(config: EngineConfig, options: argparse.Namespace) -> dict[str, Any]:
    engine = AsyncEngine(config)
    began = time.perf_counter()
    result: dict[str, Any] = {"backend": config.distributed_executor_backend}
    try:
        await engine.start()
        result["start_s"] = time.perf_counter() - began
        result["stages"] = [
            {"name": stage.name, "seconds": stage.seconds} for stage in engine.status().stages
        ]
        say(f"{result['backend']} ready in {result['start_s']:.1f} s: {result['stages']}")
        load = Load(engine, options.temperature)
        for batch in options.batches:
            await load.run(batch, INPUT_LEN, 8)
        steps = []
        for batch in options.batches:
            steps.append(await measure_step(load, batch, options.repeats))
            say(f"{result['backend']} batch {batch}: {steps[-1].ms:.3f} ms a step")
        result["steps"] = [asdict(step) for step in steps]
        if not options.only_steps:
            result |= await measure_prompts(load, options.repeats)
        say(json.dumps({key: value for key, value in result.items() if key != "steps"}))
    finally:
        await engine.shutdown()
    return result


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="keep the weights there; default: a temporary")
    parser.add_argument(
        "--backends", nargs="+", default=["uni", "ray"], choices=["uni", "ray", "mp"]
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4)
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--only-steps", action="store_true", help="no first tokens, no throughput")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        model = options.model or Path(temporary) / "model"
        began = time.perf_counter()
        make_model(model)
        say(f"weights made in {time.perf_counter() - began:.1f} s")
        results = []
        for backend in options.backends:
            config = engine_config(model, backend, options.gpu_memory_utilization)
            results.append(asyncio.run(measure(config, options)))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def engine_config(model: Path, backend: Backend, utilization: float) -> EngineConfig:
    return EngineConfig(
        model=model,
        served_model_name=("benchmark",),
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=max(BATCHES),
        gpu_memory_utilization=utilization,
        distributed_executor_backend=backend,
    )


if __name__ == "__main__":
    main()
