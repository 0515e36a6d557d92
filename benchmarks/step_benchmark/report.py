"""Rows of results, what is exposed in them, and whether the goals hold. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from step_benchmark.cell import Cell
from tpinference_engine.bench.settings import LATENCY_PERCENTILES
from tpinference_engine.bench.statistic import summarize

MAX_SHARE_OF_SYNC = 0.5
MAX_RAY_OVER_MP = 1.05
MAX_EXPOSED_US_ON_GPU = 10.0


@dataclass(frozen=True, slots=True)
class Row:
    cell: Cell
    times_s: tuple[float, ...]
    """Of each batch, in all rounds."""
    num_steps: int
    """That ran on the device in one batch."""
    baseline_us: float
    """A step's time with the same steps driven in-process."""

    @property
    def step_us(self) -> float:
        """Of the median batch: one that something else disturbed would move a mean."""
        return 1e6 * statistics.median(self.times_s) / self.num_steps

    @property
    def exposed_us(self) -> float:
        return self.step_us - self.baseline_us

    @property
    def json(self) -> dict[str, Any]:
        found = summarize(self.times_s, LATENCY_PERCENTILES)
        return {
            "backend": self.cell.backend,
            "transport": self.cell.transport,
            "placement": self.cell.placement,
            "return": self.cell.returns,
            "in_flight": self.cell.in_flight,
            "device": self.cell.device,
            "tp": self.cell.tp,
            "mean_s": found.mean,
            "percentiles_s": found.percentiles,
            "step_us": self.step_us,
            "exposed_us": self.exposed_us,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    goal: str
    found: str
    holds: bool

    @property
    def line(self) -> str:
        return f"{'holds' if self.holds else 'MISSED':<7} {self.goal}: {self.found}"


def make_rows(times_s: Mapping[Cell, Sequence[float]], num_steps: int) -> tuple[Row, ...]:
    rows = [Row(cell, tuple(times), num_steps, 0.0) for cell, times in times_s.items()]
    baselines = {row.cell.steps: row.step_us for row in rows if row.cell.is_baseline}
    return tuple(replace(row, baseline_us=baselines[row.cell.steps]) for row in rows)


def render(rows: Sequence[Row]) -> str:
    head = (
        f"{'device':<16} {'tp':>2} {'backend':<7} {'transport':<14} {'placed':<6} {'return':<6} "
        f"{'calls':>5} {'mean s':>8} {'p10':>8} {'p50':>8} {'p99':>8} {'us/step':>9} {'exposed':>8}"
    )
    return "\n".join([head, *map(_render_row, rows)])


def _render_row(row: Row) -> str:
    cell, found = row.cell, summarize(row.times_s, (10, 50, 99))
    wanted = "model" if cell.step_ms is None else f"{cell.step_ms:g} ms"
    percentiles = " ".join(f"{found.percentiles[name]:>8.4f}" for name in ("10", "50", "99"))
    return (
        f"{cell.device + ' ' + wanted:<16} {cell.tp:>2} {cell.backend:<7} {cell.transport:<14} "
        f"{cell.placement:<6} {cell.returns:<6} {cell.in_flight:>5} {found.mean:>8.4f} "
        f"{percentiles} {row.step_us:>9.1f} {row.exposed_us:>8.1f}"
    )


def judge(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """The goals that these rows can tell about; more than one rank has none."""
    by_cell = {row.cell: row for row in rows}
    verdicts = [
        verdict
        for row in rows
        if row.cell.tp == 1 and row.cell.backend == "ray"
        for verdict in (
            _judge_lag(row, by_cell),
            _judge_parity(row, by_cell),
            _judge_exposed(row),
        )
        if verdict is not None
    ]
    return tuple(verdicts)


def _is_the_product(cell: Cell) -> bool:
    return cell.transport == "compiled-graph" and cell.returns == "lagged" and cell.in_flight == 1


def _judge_lag(row: Row, by_cell: Mapping[Cell, Row]) -> Verdict | None:
    cell = row.cell
    sync = by_cell.get(replace(cell, returns="sync"))
    if cell.device != "emulated" or not _is_the_product(cell) or sync is None:
        return None
    return Verdict(
        f"emulated {cell.step_ms:g} ms, {cell.placement}: lagged exposes at most half of sync",
        f"{row.exposed_us:.1f} of {sync.exposed_us:.1f} us",
        row.exposed_us <= MAX_SHARE_OF_SYNC * sync.exposed_us,
    )


def _judge_parity(row: Row, by_cell: Mapping[Cell, Row]) -> Verdict | None:
    cell = row.cell
    mp = by_cell.get(
        replace(cell, backend="mp", transport="shared-memory", placement="same", in_flight=1)
    )
    if cell.device != "cpu" or not _is_the_product(cell) or mp is None:
        return None
    return Verdict(
        f"model on cpu, {cell.placement}: ray within 5 % of mp",
        f"{100 * (row.step_us / mp.step_us - 1):+.1f} %",
        row.step_us <= MAX_RAY_OVER_MP * mp.step_us,
    )


def _judge_exposed(row: Row) -> Verdict | None:
    cell = row.cell
    if cell.device != "cuda" or not _is_the_product(cell):
        return None
    wanted = "model" if cell.step_ms is None else f"{cell.step_ms:g} ms"
    return Verdict(
        f"cuda {wanted}, {cell.placement}: at most {MAX_EXPOSED_US_ON_GPU:g} us exposed",
        f"{row.exposed_us:.1f} us",
        row.exposed_us <= MAX_EXPOSED_US_ON_GPU,
    )
