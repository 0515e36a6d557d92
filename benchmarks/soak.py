"""Soaks the engine on a network of ours: 200,000 steps, every token checked, nothing may grow.

    python benchmarks/soak.py --model MODEL_DIR              (as root)
    python benchmarks/soak.py --parts echo --steps 10000 --rounds 1
    python benchmarks/soak.py --parts two-in-flight cut

A Ray head with the engine core and a raylet with the ranks, each in namespaces of its own; between
them a relay that delays, loses, reorders and cuts by profile. Parts: echo = ranks that echo, tokens
known in advance; model = a whole engine, tokens as without the relay; two-in-flight = echo with a
second call in flight, which the product never has: what happens is recorded and is no failure;
cut = a network that is cut for good.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from soak_benchmark.link import PROFILES
from soak_benchmark.parts import Bench, PartResult, make_phases

_PARTS = ("echo", "model", "two-in-flight", "cut")
_TWO_IN_FLIGHT_SHARE = 10
_PROFILE_OF_NAME = {profile.name: profile for profile in PROFILES}


def main() -> int:
    args = _parse()
    # As an interrupt does: all that was started is ended on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    bench = Bench(args.seed, args.tensor_parallel_size, _say)
    results: dict[str, PartResult] = {}
    for part in args.parts:
        _say(f"part {part}")
        results[part] = result = _run(part, bench, args)
        for line in (f"{part}: {'good' if result.is_good else 'NOT GOOD'}", *result.lines):
            print(line, file=sys.stderr if args.json else sys.stdout, flush=True)
    found: dict[str, Any] = {
        part: {"good": result.is_good, **result.json} for part, result in results.items()
    }
    text = json.dumps(found, indent=2)
    if args.output_json is not None:
        args.output_json.write_text(text + "\n")
    if args.json:
        print(text)
    return int(not all(result.is_good for result in results.values()))


def _run(part: str, bench: Bench, args: argparse.Namespace) -> PartResult:
    profiles = [_PROFILE_OF_NAME[name] for name in args.profiles]
    if part == "echo":
        return bench.run_echo(make_phases(profiles, args.steps, args.rounds))
    if part == "two-in-flight":
        # A comparison, and slow: steps that the reader of two channels misses wait 0.1 s.
        num_steps = max(args.steps // _TWO_IN_FLIGHT_SHARE, len(profiles))
        phases = make_phases(profiles, num_steps, 1)
        return bench.run_two_in_flight(phases, args.max_failures)
    if part == "model":
        return bench.run_model(args.model, make_phases(profiles, args.model_steps, 1))
    return bench.run_cut()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, names = parser.add_argument, list(_PROFILE_OF_NAME)
    add("--parts", nargs="+", choices=_PARTS, default=list(_PARTS), metavar="NAME")
    add("--profiles", nargs="+", choices=names, default=names, metavar="NAME", help=str(names))
    add(
        "--steps",
        type=_count,
        default=200_000,
        metavar="N",
        help="of an echo; two in flight: a tenth",
    )
    add("--rounds", type=_count, default=4, help="of an echo through all profiles")
    add("--model", type=Path, metavar="MODEL_DIR")
    add("--model-steps", type=_count, default=2_000, metavar="N")
    add("--max-failures", type=_count, default=10, metavar="N", help="of two calls in flight")
    add("--tensor-parallel-size", "-tp", type=_count, default=2, metavar="N")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="print JSON in place of sentences")
    add("--output-json", type=Path, metavar="FILE", help="a file for the JSON")
    args = parser.parse_args()
    if "model" in args.parts and args.model is None:
        parser.error("part model needs --model MODEL_DIR")
    if args.steps < args.rounds * len(args.profiles):
        parser.error(f"--steps is {args.steps}, must be a step or more for each phase")
    if os.geteuid() != 0:
        parser.error("needs root: it makes namespaces and network devices of its own")
    return args


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a whole number, at least 1")
    return int(text)


def _say(text: str) -> None:
    load = os.getloadavg()[0]
    print(f"{time.strftime('%T')} {text} (load {load:.1f})", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
