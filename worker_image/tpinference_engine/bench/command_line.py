"""`bench`'s command line, read once into settings. Flags have vLLM's names."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from tpinference_engine.bench.settings import (
    LatencyBench,
    Metric,
    Report,
    ServeBench,
    ThroughputBench,
)
from tpinference_engine.command_line import (
    HelpFormatter,
    Parser,
    add_engine_flags,
    engine_config,
    number,
    whole,
)

Bench = LatencyBench | ThroughputBench | ServeBench

_DESCRIPTION = """\
Measure an engine.

benchmarks:
  latency     how long one batch takes, from its first prompt to its last token
  throughput  how many tokens a second come of many prompts at once
  serve       what clients of a running server see at a given rate of requests

'tpinference-engine bench BENCHMARK --help' shows a benchmark's flags.
"""


def parse_bench(argv: Sequence[str], environ: Mapping[str, str]) -> Bench:
    """Settings of `bench <argv>`. Raises InvalidConfig that says what is allowed."""
    parser = Parser(
        prog="tpinference-engine bench",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=tuple(_PARSERS), metavar="BENCHMARK")
    kind = parser.parse_args(argv[:1]).kind
    return _PARSERS[kind](argv[1:], environ)


def _latency(argv: Sequence[str], environ: Mapping[str, str]) -> LatencyBench:
    parser = _parser("latency", "Measure how long one batch of requests takes.")
    group = parser.add_argument_group("benchmark")
    _add_count(group, "--input-len", 32, "tokens of a prompt")
    _add_count(group, "--output-len", 128, "tokens that follow it")
    _add_count(group, "--batch-size", 8, "requests at once")
    _add_count(group, "--num-iters-warmup", 10, "batches that are not measured", minimum=0)
    _add_count(group, "--num-iters", 30, "batches that are")
    _add_report_flags(group)
    add_engine_flags(parser)
    args = parser.parse_args(argv)
    return LatencyBench(
        engine=engine_config(args, environ),
        report=_report(args),
        input_len=args.input_len,
        output_len=args.output_len,
        batch_size=args.batch_size,
        num_iters_warmup=args.num_iters_warmup,
        num_iters=args.num_iters,
    )


def _throughput(argv: Sequence[str], environ: Mapping[str, str]) -> ThroughputBench:
    parser = _parser("throughput", "Measure how many tokens a second an engine makes.")
    group = parser.add_argument_group("benchmark")
    _add_load_flags(group)
    _add_report_flags(group)
    add_engine_flags(parser)
    args = parser.parse_args(argv)
    return ThroughputBench(
        engine=engine_config(args, environ),
        report=_report(args),
        num_prompts=args.num_prompts,
        random_input_len=args.random_input_len,
        random_output_len=args.random_output_len,
    )


def _serve(argv: Sequence[str], environ: Mapping[str, str]) -> ServeBench:
    parser = _parser("serve", "Measure what clients of a running server see.")
    group = parser.add_argument_group("benchmark")
    add = group.add_argument
    add("--base-url", metavar="URL", default="http://127.0.0.1:8000", help="of the OpenAI routes")
    add("--model", metavar="NAME", help="in requests (default: the first that the server names)")
    _add_load_flags(group)
    add(
        "--request-rate",
        metavar="R",
        type=number,
        default=math.inf,
        help="requests a second, arriving at random; inf = all at once",
    )
    add(
        "--max-concurrency",
        metavar="N",
        type=whole(1),
        help="requests in flight at most (default: no limit)",
    )
    add("--seed", metavar="N", type=whole(0), default=0, help="of prompts and arrivals")
    add(
        "--percentile-metrics",
        metavar="NAMES",
        type=_metrics,
        default=("ttft", "tpot", "itl"),
        help=f"which to print, of {','.join(get_args(Metric))} (default: ttft,tpot,itl)",
    )
    add(
        "--metric-percentiles",
        metavar="PERCENTS",
        type=_percents,
        default=(99.0,),
        help="which to print beside mean and median (default: 99)",
    )
    _add_report_flags(group)
    args = parser.parse_args(argv)
    return ServeBench(
        base_url=args.base_url,
        model=args.model,
        report=_report(args),
        num_prompts=args.num_prompts,
        random_input_len=args.random_input_len,
        random_output_len=args.random_output_len,
        request_rate=args.request_rate,
        max_concurrency=args.max_concurrency,
        seed=args.seed,
        percentile_metrics=args.percentile_metrics,
        metric_percentiles=args.metric_percentiles,
    )


_PARSERS: dict[str, Callable[[Sequence[str], Mapping[str, str]], Bench]] = {
    "latency": _latency,
    "throughput": _throughput,
    "serve": _serve,
}


def _parser(kind: str, description: str) -> Parser:
    return Parser(
        prog=f"tpinference-engine bench {kind}",
        description=description,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )


class _Formatter(HelpFormatter):
    """A default that is a tuple is told in the help's own words."""

    def _get_help_string(self, action: argparse.Action) -> str:
        told = isinstance(action.default, tuple)
        return str(action.help) if told else super()._get_help_string(action)


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    _add_count(group, "--num-prompts", 1000, "requests")
    _add_count(group, "--random-input-len", 1024, "tokens of a prompt")
    _add_count(group, "--random-output-len", 128, "tokens that follow it")


def _add_report_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", action="store_true", help="print JSON in place of text")
    group.add_argument(
        "--output-json", metavar="FILE", type=Path, help="a file for the JSON (default: none)"
    )


def _add_count(
    group: argparse._ArgumentGroup, flag: str, default: int, what: str, *, minimum: int = 1
) -> None:
    group.add_argument(flag, metavar="N", type=whole(minimum), default=default, help=what)


def _report(args: argparse.Namespace) -> Report:
    return Report(as_json=args.json, file=args.output_json)


def _metrics(text: str) -> tuple[Metric, ...]:
    allowed: dict[str, Metric] = {name: name for name in get_args(Metric)}
    names = text.split(",")
    for name in names:
        if name not in allowed:
            raise argparse.ArgumentTypeError(
                f"has {name!r}, must be names of {', '.join(allowed)} with commas between"
            )
    return tuple(allowed[name] for name in names)


def _percents(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"is {text!r}, must be numbers from 0 to 100 with commas between"
        ) from None
