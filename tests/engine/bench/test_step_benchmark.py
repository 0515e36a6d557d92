"""benchmarks/executors.py: its messages are lawful steps, its rows and goals are what they say."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import pytest
from step_benchmark.cell import Cell, Choice, Return, choose_cells
from step_benchmark.messages import Shape, count_forwards, number_steps, plan_batch
from step_benchmark.paced import PacedDriver
from step_benchmark.plot import render_svg
from step_benchmark.report import Row, judge, make_rows, render
from step_benchmark.runners import SyncReturn, runner_factory

from tpinference_engine.config import EngineConfig
from tpinference_engine.executor.base import RankPlace
from tpinference_engine.runner.base import RankSetup
from tpinference_engine.runner.echo import DEFAULT_VOCAB_SIZE, EchoRunner, echo_token
from tpinference_engine.step import StepInput, StepOutput, decode_output, encode_input
from tpinference_engine.worker import Worker

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "executors.py"
EPOCH = 2
SHAPE = Shape(batch_size=3, input_len=7, output_len=5, max_num_batched_tokens=9, block_size=4)
CELL = Cell(
    device="emulated",
    step_ms=1.0,
    tp=1,
    backend="ray",
    transport="compiled-graph",
    placement="same",
    returns="lagged",
    in_flight=1,
)


def echo_config(make_config: Callable[..., EngineConfig]) -> EngineConfig:
    return make_config(
        max_num_seqs=SHAPE.batch_size,
        max_num_batched_tokens=SHAPE.max_num_batched_tokens,
        max_model_len=SHAPE.max_model_len,
        num_gpu_blocks_override=SHAPE.batch_size * SHAPE.blocks_per_slot,
        distributed_executor_backend="uni",
        epoch=EPOCH,
    )


def run(worker: Worker, steps: Sequence[StepInput]) -> list[tuple[int, int, int]]:
    outputs = [decode_output(worker.step(encode_input(step))) for step in steps]
    return [(t.slot, t.position, t.token) for output in outputs for t in output.tokens]


@pytest.fixture
def make_worker(make_config: Callable[..., EngineConfig]) -> Callable[..., Worker]:
    def make(returns: Return) -> Worker:
        def make_runner(config: EngineConfig) -> Any:
            echo = EchoRunner(config)
            return SyncReturn(echo) if returns == "sync" else echo

        worker = Worker(echo_config(make_config), make_runner)
        worker.initialize(0, EPOCH)
        worker.allocate_cache(SHAPE.batch_size * SHAPE.blocks_per_slot)
        return worker

    return make


@pytest.mark.parametrize("returns", ["lagged", "sync"])
def test_batches_are_lawful_steps_one_after_another(
    make_worker: Callable[..., Worker], returns: Return
) -> None:
    """The echo runner finds every wrong block, owner and position; its tokens can be predicted."""
    worker = make_worker(returns)
    step_id = 0
    for iteration in range(3):
        steps = number_steps(plan_batch(SHAPE, returns, iteration), step_id, EPOCH)
        step_id += len(steps)
        found = run(worker, steps)
        expected = [1] * SHAPE.input_len
        for _ in range(SHAPE.output_len):
            expected.append(
                echo_token(expected, prompt_length=SHAPE.input_len, vocab_size=DEFAULT_VOCAB_SIZE)
            )
        for slot in range(SHAPE.batch_size):
            tokens = [token for owner, _, token in sorted(found) if owner == slot]
            assert tokens == expected[SHAPE.input_len :]


def test_both_returns_take_the_same_forwards_and_sync_needs_no_flush() -> None:
    lagged, sync = plan_batch(SHAPE, "lagged", 0), plan_batch(SHAPE, "sync", 0)
    assert [step.forward for step in lagged] == [*(step.forward for step in sync), ()]
    assert count_forwards(lagged) == count_forwards(sync) == len(sync)
    assert all(len(s.forward) and len(s.sample) <= len(s.forward) for s in sync)


def test_a_step_holds_no_more_tokens_than_it_may() -> None:
    for step in plan_batch(SHAPE, "lagged", 0):
        assert sum(row.num_tokens for row in step.forward) == step.bucket <= 9


def test_a_batch_that_fits_is_one_prefill_and_then_decodes() -> None:
    shape = replace(SHAPE, max_num_batched_tokens=64)
    steps = plan_batch(shape, "lagged", 0)
    assert [step.bucket for step in steps] == [21, 3, 3, 3, 3, 0]


def test_the_emulated_device_is_never_faster_than_its_steps(
    make_config: Callable[..., EngineConfig],
) -> None:
    runner = runner_factory("emulated", 0.002, "lagged")(echo_config(make_config))
    setup = RankSetup(rank=0, store=None, address="", device_index=0, num_threads=1)
    runner.initialize(setup)
    began = time.perf_counter()
    steps = plan_batch(SHAPE, "lagged", 0)
    tokens = [runner.enqueue(step).wait() for step in steps]
    assert time.perf_counter() - began >= 0.002 * count_forwards(steps)
    assert [len(found) for found in tokens] == [len(step.sample) for step in steps]


class InstantDriver:
    """Answers at once, and says that its rank waited 20 ms for the device."""

    def __init__(self) -> None:
        self.places: tuple[RankPlace, ...] = ()
        self.sent_at: list[float] = []
        self.looked_at: list[float] = []

    def submit(self, step: StepInput) -> None:
        self.sent_at.append(time.monotonic())
        self.step = step

    def collect(self) -> StepOutput:
        self.looked_at.append(time.monotonic())
        return StepOutput(self.step.step_id, 0, 0, 0, 0, skew_us=20_000, skews_us=(20_000,))

    def shutdown(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(
    ("device", "held", "napped"), [("cuda", True, False), ("cpu", False, True)]
)
def test_paced_steps_are_held_back_or_looked_for_late(
    device: Literal["cuda", "cpu"], held: bool, napped: bool
) -> None:
    driver = InstantDriver()
    paced = PacedDriver(driver, device)
    for step_id in range(3):
        paced.submit(StepInput(step_id, 0, bucket=8))
        paced.collect()
    # The first step teaches nothing, as no step came before it; the second one does.
    assert (driver.sent_at[2] - driver.looked_at[1] > 0.01) is held
    assert (driver.looked_at[2] - driver.sent_at[2] > 0.01) is napped


def choice(**changes: Any) -> Choice:
    wide: dict[str, Any] = {
        "devices": [("emulated", 1.0)],
        "tps": [1],
        "backends": ["ray", "mp", "uni"],
        "transports": ["compiled-graph", "actor-call", "shared-memory", "in-process"],
        "placements": ["same", "across"],
        "returns": ["lagged", "sync"],
        "in_flights": [1, 2],
    }
    return Choice(**{**wide, **changes})


def test_every_way_is_compared_with_the_same_steps_in_process() -> None:
    cells = choose_cells(choice(backends=["ray"], transports=["compiled-graph"]))
    assert len(cells) == len(set(cells)) == 2 * (1 + 2 * 2)
    baselines = {cell.steps for cell in cells if cell.is_baseline}
    assert baselines == {cell.steps for cell in cells}


def test_shared_memory_never_has_two_calls_in_flight() -> None:
    found = [c for c in choose_cells(choice()) if c.transport == "shared-memory"]
    assert {(cell.in_flight, cell.placement) for cell in found} == {(1, "same")}
    assert not [c for c in choose_cells(choice(in_flights=[2])) if c.backend == "mp"]


UNI = replace(CELL, backend="uni", transport="in-process")


def rows_of(times_s: dict[Cell, float]) -> tuple[Row, ...]:
    return make_rows({cell: [time_s, time_s] for cell, time_s in times_s.items()}, 100)


def test_exposed_is_what_a_step_takes_longer_than_in_process() -> None:
    slow_uni = replace(UNI, step_ms=2.0)
    rows = rows_of({UNI: 0.1, CELL: 0.101, slow_uni: 0.2, replace(CELL, step_ms=2.0): 0.203})
    exposed = [row.exposed_us for row in rows]
    assert exposed == pytest.approx([0, 10, 0, 30])
    assert rows[1].json == {
        "backend": "ray",
        "transport": "compiled-graph",
        "placement": "same",
        "return": "lagged",
        "in_flight": 1,
        "device": "emulated",
        "tp": 1,
        "mean_s": pytest.approx(0.101),
        "percentiles_s": dict.fromkeys(("10", "25", "50", "75", "90", "99"), 0.101),
        "step_us": pytest.approx(1010),
        "exposed_us": pytest.approx(10),
    }
    assert len(render(rows).splitlines()) == 5


def test_the_picture_has_a_bar_for_every_way_but_in_process() -> None:
    faster = replace(CELL, placement="across")
    rows = rows_of({UNI: 0.1, CELL: 0.1015, faster: 0.099})
    picture = ElementTree.fromstring(render_svg(rows))
    texts = [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if "compiled-graph" in text] == [
        "emulated 1 ms, ray compiled-graph, same, lagged, 1 in flight",
        "emulated 1 ms, ray compiled-graph, across, lagged, 1 in flight",
    ]
    assert {"15", "-10"} <= set(texts)


def test_a_disturbed_batch_moves_the_mean_and_not_the_step() -> None:
    (row,) = make_rows({UNI: [0.1, 0.1, 0.4]}, 100)
    assert row.step_us == pytest.approx(1000)
    assert row.json["mean_s"] == pytest.approx(0.2)


@pytest.mark.parametrize(("lagged_s", "holds"), [(0.1015, True), (0.103, False)])
def test_the_lag_has_to_halve_what_is_exposed(lagged_s: float, holds: bool) -> None:
    sync = replace(CELL, returns="sync")
    rows = rows_of({UNI: 0.1, CELL: lagged_s, replace(UNI, returns="sync"): 0.1, sync: 0.104})
    assert [verdict.holds for verdict in judge(rows)] == [holds]


@pytest.mark.parametrize(("ray_s", "holds"), [(1.04, True), (1.06, False)])
def test_ray_has_to_be_near_mp_with_a_model_on_cpu(ray_s: float, holds: bool) -> None:
    cpu = replace(CELL, device="cpu", step_ms=None)
    mp = replace(cpu, backend="mp", transport="shared-memory")
    uni = replace(UNI, device="cpu", step_ms=None)
    (verdict,) = judge(rows_of({uni: 0.9, mp: 1.0, cpu: ray_s}))
    assert verdict.holds is holds


@pytest.mark.parametrize(("ray_s", "holds"), [(0.1009, True), (0.1011, False)])
def test_a_gpu_may_see_ten_microseconds(ray_s: float, holds: bool) -> None:
    gpu, uni = replace(CELL, device="cuda"), replace(UNI, device="cuda")
    (verdict,) = judge(rows_of({uni: 0.1, gpu: ray_s}))
    assert verdict.holds is holds


def test_more_ranks_than_one_have_no_goal() -> None:
    two = {replace(UNI, tp=2): 0.1, replace(CELL, tp=2): 0.2}
    sync = {replace(cell, returns="sync"): 0.2 for cell in two}
    assert judge(rows_of({**two, **sync})) == ()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--device cpu", "--device cpu runs a model: give --model MODEL_DIR"),
        ("--device tpu", "choose from"),
        ("--rounds 0", "is '0', must be a whole number, at least 1"),
        ("--step-ms 0", "is '0', must be a number greater than 0"),
        ("--in-flight 3", "choose from 1, 2"),
    ],
)
def test_wrong_input_is_refused(line: str, words: str) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *line.split()], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert words in done.stderr
