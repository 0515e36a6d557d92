"""Compares the ways in which a step reaches its ranks: ray, mp and in-process, in one run.

    python benchmarks/executors.py --device emulated
    python benchmarks/executors.py --device cpu --model MODEL_DIR
    python benchmarks/executors.py --device cuda --return lagged sync --in-flight 1 2

The same batches (prefill, then decode) go through the product's own executors, in turns: each round
starts every one of them anew. Exposed is what a step takes longer than the same steps driven
in-process. A step without the lag, and two calls in flight, exist for this comparison alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar, get_args

from step_benchmark.cell import (
    PATHS_OF_BACKEND,
    Cell,
    Choice,
    Device,
    Placement,
    Return,
    choose_cells,
)
from step_benchmark.measurement import Task, engine_config, measure
from step_benchmark.messages import Shape, count_forwards, plan_batch
from step_benchmark.plot import render_svg
from step_benchmark.raylets import RayletGroup
from step_benchmark.report import judge, make_rows, render

from tpinference_engine.config import Backend

P = ParamSpec("P")
T = TypeVar("T")

_DEFAULT_STEP_MS = (2.6, 0.8)


def main() -> int:
    args = _parse()
    shape = Shape(
        batch_size=args.batch_size,
        input_len=args.input_len,
        output_len=args.output_len,
        max_num_batched_tokens=max(2048, args.batch_size),
        block_size=16,
    )
    cells = choose_cells(_choice(args))
    times_s: dict[Cell, list[float]] = {cell: [] for cell in cells}
    with ExitStack() as stack:
        machine = _Machine(args, shape, stack)
        for number in range(args.rounds):
            for cell in cells:
                found = machine.measure(cell)
                times_s[cell] += found
                _say(f"round {number + 1} of {args.rounds}, {cell.name}: {_seconds(found)}")
    rows = make_rows(times_s, count_forwards(plan_batch(shape, "sync", 0)))
    text = json.dumps({"rows": [row.json for row in rows]}, indent=2)
    if args.output_json is not None:
        args.output_json.write_text(text + "\n")
    if args.plot is not None:
        args.plot.write_text(render_svg(rows))
    print(text if args.json else render(rows))
    verdicts = judge(rows)
    for verdict in verdicts:
        print(verdict.line, file=sys.stderr if args.json else sys.stdout)
    return int(args.check and not all(verdict.holds for verdict in verdicts))


@dataclass
class _Machine:
    """Makes what a cell needs when the first one needs it, and keeps it to the end."""

    args: argparse.Namespace
    shape: Shape
    stack: ExitStack
    raylets: dict[Placement, RayletGroup] = field(default_factory=dict)
    layers: dict[float, int] = field(default_factory=dict)

    def measure(self, cell: Cell) -> tuple[float, ...]:
        return _in_a_process(measure, self._task(cell, self._amount(cell)))

    def _task(self, cell: Cell, amount: float | None) -> Task:
        args = self.args
        return Task(
            cell=cell,
            shape=self.shape,
            model=args.model if cell.step_ms is None else None,
            amount=amount,
            ray_address=self._address(cell) if cell.backend == "ray" else None,
            num_warmups=args.num_iters_warmup,
            num_batches=args.num_iters,
            host_work_s=args.host_work_us / 1e6,
            paced=not args.at_once,
        )

    def _address(self, cell: Cell) -> str:
        if cell.placement not in self.raylets:
            size = max(self.args.tensor_parallel_size)
            num_gpus = size if "cuda" in self.args.device else 0
            self.raylets[cell.placement] = found = RayletGroup(cell.placement, size, num_gpus)
            self.stack.callback(found.close)
        return self.raylets[cell.placement].address

    def _amount(self, cell: Cell) -> float | None:
        if cell.step_ms is None or cell.device != "cuda":
            return None if cell.step_ms is None else cell.step_ms / 1000
        if cell.step_ms not in self.layers:
            from step_benchmark.cuda_graph import count_layers

            config = engine_config(self._task(cell, None))
            num_layers, alone_ms = _in_a_process(count_layers, config, cell.step_ms)
            _say(f"a CUDA graph of {num_layers} layers takes {alone_ms:.3f} ms alone")
            self.layers[cell.step_ms] = num_layers
        return self.layers[cell.step_ms]


def _in_a_process(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Of its own, so that nothing of one cell is left for the next."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *args, **kwargs).result()


def _choice(args: argparse.Namespace) -> Choice:
    return Choice(
        devices=tuple(_devices(args)),
        tps=args.tensor_parallel_size,
        backends=args.backends,
        transports=args.transports,
        placements=args.placements,
        returns=args.returns,
        in_flights=args.in_flight,
    )


def _devices(args: argparse.Namespace) -> Iterator[tuple[Device, float | None]]:
    for device in args.device:
        if device == "cpu" or (device == "cuda" and args.model is not None):
            yield device, None
        else:
            yield from ((device, step_ms) for step_ms in args.step_ms)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    transports = [path for paths in PATHS_OF_BACKEND.values() for path in paths]
    for flag, allowed, default in (
        ("--device", get_args(Device), ["emulated"]),
        ("--backends", get_args(Backend), list(get_args(Backend))),
        ("--transports", transports, transports),
        ("--placements", get_args(Placement), list(get_args(Placement))),
    ):
        add(flag, nargs="+", choices=allowed, default=default, metavar="NAME", help=_list(allowed))
    add("--return", dest="returns", nargs="+", choices=get_args(Return), default=["lagged"])
    add("--in-flight", nargs="+", type=int, choices=(1, 2), default=[1], help="calls at once")
    add("--model", type=Path, metavar="MODEL_DIR", help="for cpu; for cuda in place of a graph")
    add("--step-ms", nargs="+", type=_positive, default=list(_DEFAULT_STEP_MS), metavar="MS")
    add("--tensor-parallel-size", "-tp", nargs="+", type=_count, default=[1], metavar="N")
    for flag, value in (
        ("--batch-size", 8),
        ("--input-len", 128),
        ("--output-len", 256),
        ("--num-iters-warmup", 1),
        ("--num-iters", 3),
        ("--rounds", 3),
    ):
        add(flag, type=_count, default=value, metavar="N")
    add("--host-work-us", type=float, default=0.0, metavar="US", help="of a scheduler, emulated")
    add("--at-once", action="store_true", help="send the next call at once, not at the core's pace")
    add("--json", action="store_true", help="print JSON in place of a table")
    add("--output-json", type=Path, metavar="FILE", help="a file for the JSON")
    add("--plot", type=Path, metavar="FILE", help="an SVG picture of what is exposed")
    add("--check", action="store_true", help="exit with 1 if a goal is missed")
    args = parser.parse_args()
    if "cpu" in args.device and args.model is None:
        parser.error("--device cpu runs a model: give --model MODEL_DIR")
    return args


def _list(allowed: Sequence[str]) -> str:
    return f"of {', '.join(allowed)}"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a whole number, at least 1")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a number greater than 0")
    return value


def _seconds(times_s: Sequence[float]) -> str:
    return ", ".join(f"{time_s:.4f} s" for time_s in times_s)


def _say(text: str) -> None:
    load = os.getloadavg()[0]
    print(f"{text} (load {load:.1f})", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
