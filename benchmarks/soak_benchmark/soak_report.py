"""What a soak has found, as rows, sentences and JSON. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from soak_benchmark.resource_use import MAX_GROWTH, Growth, find_growth
from soak_benchmark.watched_run import Event, Found, Phase

_FATES = ("sent", "late", "lost", "cut")
_OUT_OF_ORDER = ("must be its successor", "acknowledged step id")
"""What a rank or the driver says of a message that is not the next one."""


def growth_of(found: Found, phases: Sequence[Phase]) -> tuple[Growth, ...]:
    return find_growth(found.samples, max(phase.round for phase in phases))


def describe_failure(failure: Event) -> str:
    text = f"{failure['message']} {failure.get('cause')}"
    if any(words in text for words in _OUT_OF_ORDER):
        return "out of order"
    if "Timeout" in failure["kind"] or "TimedOut" in failure["kind"]:
        return "nothing came"
    return str(failure["kind"])


def render_phases(passed: Sequence[Event]) -> list[str]:
    """A line for each profile, over all rounds."""
    names = list(dict.fromkeys(event["profile"] for event in passed))
    head = "profile steps mean-ms p50-ms p99-ms max-ms over-100ms packets late lost cut".split()
    rows = [head] + [_row(name, [e for e in passed if e["profile"] == name]) for name in names]
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]
    return ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]


def _row(name: str, events: Sequence[Event]) -> list[str]:
    steps = sum(event["steps"] for event in events)
    mean_ms = 1e3 * sum(event["seconds"] for event in events) / steps
    fates: Counter[str] = Counter()
    for event in events:
        fates.update(event["fates"])
    times = [f"{mean_ms:.2f}"]
    if "p50_ms" in events[0]:
        middle = [statistics.median(event[key] for event in events) for key in ("p50_ms", "p99_ms")]
        times += [f"{value:.2f}" for value in (*middle, max(event["p100_ms"] for event in events))]
        times.append(str(sum(event["slow"] for event in events)))
    else:
        times += ["-"] * 4
    counts = [sum(fates.values()), *(fates[fate] for fate in _FATES[1:])]
    return [name.replace(" ", "-"), str(steps), *times, *map(str, counts)]


def render_growth(growth: Sequence[Growth]) -> Iterator[str]:
    if not growth:
        yield "too few rounds to see growth"
    for found in growth:
        verdict = "holds" if found.holds else "TOO MUCH"
        yield (
            f"{found.owner}, {found.what}: {found.early:.1f} to {found.late:.1f} "
            f"(may grow by {MAX_GROWTH[found.what]:g}: {verdict})"
        )


def render_found(found: Found, phases: Sequence[Phase]) -> Iterator[str]:
    yield from render_phases(found.passed)
    yield f"{found.num_steps} steps, {found.num_wrong} with wrong tokens"
    if found.failure is not None:
        yield f"failed: {found.failure['kind']}: {found.failure['message']}"
    yield from render_growth(growth_of(found, phases))


def found_json(found: Found, phases: Sequence[Phase]) -> dict[str, Any]:
    return {
        "steps": found.num_steps,
        "wrong": found.num_wrong,
        "failure": found.failure,
        "shutdown_s": found.shutdown_s,
        "phases": [{k: v for k, v in event.items() if k != "tokens"} for event in found.passed],
        "growth": [{**asdict(g), "holds": g.holds} for g in growth_of(found, phases)],
    }
