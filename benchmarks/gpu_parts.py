# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""The parts of a decode step on one GPU against a roof measured in the same run.

Llama-3.1-8B's shapes with random weights, made on the device: no files, no engine around it. A step
is the replay of the graph that the engine captures. Run it as
`python benchmarks/gpu_parts.py [--json FILE] [--tune]`; `--tune` compares tilings of the products.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from tpinference_engine.kernels import ops as kernel_ops
from tpinference_engine.kernels.gated import silu_gated
from tpinference_engine.kernels.linear import Tiling
from tpinference_engine.kernels.ops import KernelOps
from tpinference_engine.model.config import GenerationDefaults, ModelConfig, RopeConfig
from tpinference_engine.model.llama import (
    AttentionWeights,
    LayerWeights,
    Llama,
    LlamaWeights,
    MlpWeights,
)
from tpinference_engine.model.load import num_bytes
from tpinference_engine.model.parallel import GroupSetup, TensorParallel
from tpinference_engine.model.rope import make_rotation
from tpinference_engine.model.shard import shard_of
from tpinference_engine.runner.cache import CacheShape, PagedCache
from tpinference_engine.runner.device_state import DeviceState
from tpinference_engine.runner.kernel_compute import KernelCompute

BATCHES = {1: 320, 8: 320, 64: 320, 256: 320}
"""Rows, and positions that each sees: as amid the slope of gpu_decode.py."""
BLOCK_SIZE = 16
REPLAYS = 30
LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500000.0),
    max_position=8192,
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    dtype="bfloat16",
    eos_token_ids=(),
    generation=GenerationDefaults(),
)
ROW_TILINGS = [
    Tiling(block_n=n, block_k=k, warps=w, early=early)
    for n, k, w in [(1, 4096, 4), (2, 4096, 4), (2, 2048, 4), (4, 2048, 8)]
    for early in (False, True)
]
BATCH_TILINGS = [
    Tiling(block_n=n, block_k=k, warps=w, stages=s)
    for n, k, w, s in [
        (16, 128, 4, 3),
        (16, 128, 4, 4),
        (16, 64, 4, 6),
        (32, 64, 4, 4),
        (32, 128, 4, 3),
    ]
]
TUNED = {
    "ROW": ROW_TILINGS,
    "GATED_ROW": ROW_TILINGS,
    "LONG_ROW": ROW_TILINGS,
    "BATCH": BATCH_TILINGS,
    "GATED_BATCH": BATCH_TILINGS,
    "LONG_BATCH": BATCH_TILINGS,
    "SQUARE_BATCH": BATCH_TILINGS,
}
"""Constants of kernels/ops.py, and what they are compared with."""


class LibraryOps(KernelOps):
    """All products by cuBLAS."""

    def linear(
        self, x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.linear(x_TD, weight_ND, bias_N)

    def gated(
        self, x_TD: torch.Tensor, weight_WD: torch.Tensor, bias_W: torch.Tensor | None
    ) -> torch.Tensor:
        return silu_gated(F.linear(x_TD, weight_WD, bias_W))

    def head(self, x_RD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        return torch.mm(x_RD, weight_VD.t(), out_dtype=torch.float32)


@triton.jit
def _read_kernel(x, out, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK * STEPS + tl.arange(0, BLOCK)
    seen = tl.zeros([BLOCK], tl.int32)
    for step in tl.static_range(STEPS):
        seen ^= tl.load(x + first + step * BLOCK)
    if tl.max(seen, 0) == 123456789:
        tl.store(out, 1)


def milliseconds(work: Callable[[], object], repeats: int = REPLAYS) -> float:
    """Median of one call, by the device's clock."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    work()
    for begin, end in events:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def read_bandwidth() -> float:
    """Bytes a second that a kernel that only reads gets out of the memory."""
    words = torch.randint(0, 1 << 20, (1 << 30,), dtype=torch.int32, device="cuda")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    block, steps = 2048, 16
    grid = (words.numel() // (block * steps),)
    took = milliseconds(lambda: _read_kernel[grid](words, out, block, steps, num_warps=8), 10)
    return words.nbytes / took * 1e3


def random_weights(config: ModelConfig) -> LlamaWeights:
    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * shape[-1] ** -0.5

    width, heads = config.hidden_size, config.num_heads * config.head_dim
    merged = heads + 2 * config.num_kv_heads * config.head_dim
    ones = torch.ones(width, dtype=torch.bfloat16, device="cuda")
    layers = [
        LayerWeights(
            attention_norm_D=ones,
            attention=AttentionWeights(
                qkv_QD=made(merged, width),
                qkv_Q=None,
                o_DO=made(width, heads),
                o_D=None,
                q_norm_K=None,
                k_norm_K=None,
            ),
            mlp_norm_D=ones,
            mlp=MlpWeights(
                gate_up_WD=made(2 * config.intermediate_size, width),
                gate_up_W=None,
                down_DM=made(width, config.intermediate_size),
                down_D=None,
            ),
        )
        for _ in range(config.num_layers)
    ]
    vocab = config.vocab_size
    return LlamaWeights(
        embedding_VD=made(vocab, width),
        layers=tuple(layers),
        norm_D=ones,
        head_VD=made(vocab, width),
    )


@dataclass
class Rank:
    """What a rank has on its device, without a runner."""

    config: ModelConfig
    weights: LlamaWeights
    cache: PagedCache

    def state(self, ops: KernelOps) -> DeviceState:
        setup = GroupSetup(rank=0, size=1, store=None, address="", kind="nccl", timeout_s=1.0)
        compute = KernelCompute()
        compute.ops = ops
        shard = shard_of(self.config, 0, 1)
        model = Llama(self.config, shard, self.weights, TensorParallel(setup), compute.ops)
        rotation = make_rotation(
            self.config.rope,
            head_dim=self.config.head_dim,
            max_len=self.config.max_position,
            dtype=torch.bfloat16,
            device=self.cache.device,
        )
        return DeviceState(model, rotation, self.cache, compute)


def make_rank(config: ModelConfig, max_rows: int, longest: int) -> Rank:
    each = -(-longest // BLOCK_SIZE)
    cache = PagedCache(
        CacheShape(
            num_layers=config.num_layers,
            block_size=BLOCK_SIZE,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.bfloat16,
        ),
        num_blocks=max_rows * each,
        num_slots=max_rows,
        max_blocks_per_slot=each,
        device=torch.device("cuda", 0),
    )
    order = torch.randperm(max_rows * each, device="cuda").view(max_rows, each)
    cache.tables_SC.copy_(order)
    return Rank(config, random_weights(config), cache)


def capture(
    rank: Rank, rows: int, context: int, ops: KernelOps | None = None
) -> Callable[[], None]:
    """A decode of so many rows as a graph of its own; returns what replays it."""
    state = rank.state(ops or KernelOps())
    tokens = torch.zeros((3, rows), dtype=torch.int64, device="cuda")
    tokens[0] = torch.arange(rows)
    tokens[1] = torch.arange(rows)
    tokens[2] = context - 1
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        state.forward_decodes(tokens)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        state.forward_decodes(tokens)
        graph.capture_end()
    torch.cuda.synchronize()
    kept: list[Any] = [graph, state, tokens]

    def replay() -> None:
        kept[0].replay()

    return replay


def tune(rank: Rank, rows: int) -> list[dict[str, object]]:
    """The whole step with one class of products cut in each way."""
    found: list[dict[str, object]] = []
    for name, tilings in TUNED.items():
        if name.endswith("ROW") != (rows == 1):
            continue
        standard = getattr(kernel_ops, name)
        for tiling in tilings:
            setattr(kernel_ops, name, tiling)
            took = milliseconds(capture(rank, rows, BATCHES[1]))
            found.append({"product": name, "tiling": str(tiling), "rows": rows, "ms": took})
            print(f"{took:.3f} ms {rows} {name} {tiling}", file=sys.stderr, flush=True)
        setattr(kernel_ops, name, standard)
    return found


def kernel_times(replay: Callable[[], None], top: int = 14) -> dict[str, float]:
    """Microseconds of each kernel in one replay, by the profiler. With programmatic launch a
    kernel's time holds its wait for its predecessor."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    times = {event.key[:60]: event.device_time_total for event in profile.key_averages()}
    return dict(sorted(times.items(), key=lambda item: -item[1])[:top])


def measure(rank: Rank, roof: float) -> list[dict[str, object]]:
    weight_bytes = num_bytes(rank.weights) - rank.weights.embedding_VD.nbytes
    token_bytes = 2 * 2 * rank.config.num_layers * rank.config.num_kv_heads * rank.config.head_dim
    rows_of_table: list[dict[str, object]] = []
    for rows, context in BATCHES.items():
        replay = capture(rank, rows, context)
        took = milliseconds(replay)
        plain = milliseconds(capture(rank, rows, context, LibraryOps()))
        least = (weight_bytes + rows * context * token_bytes) / roof * 1e3
        rows_of_table.append(
            {
                "rows": rows,
                "context": context,
                "ms": took,
                "ms_products_by_cublas": plain,
                "roof_ms": least,
                "over_roof": took / least,
                "kernels_us": kernel_times(replay),
            }
        )
        print(json.dumps(rows_of_table[-1]), file=sys.stderr, flush=True)
    return rows_of_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument(
        "--tune", type=int, nargs="*", default=[], help="rows to compare tilings at"
    )
    arguments = parser.parse_args()
    with torch.inference_mode():
        roof = read_bandwidth()
        print(f"read-only bandwidth {roof / 1e12:.3f} TB/s", file=sys.stderr, flush=True)
        rank = make_rank(LLAMA_8B, max(BATCHES), max(BATCHES.values()))
        result: dict[str, object] = {"read_bytes_per_s": roof, "steps": measure(rank, roof)}
        if arguments.tune:
            result["tuning"] = [row for rows in arguments.tune for row in tune(rank, rows)]
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
