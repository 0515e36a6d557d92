"""The message of one step, and its answer: the only types that cross from the driver to a rank.

One packed `bytes` each way, all int32 (floats and 64-bit seeds are bit-cast), because a single
`bytes` argument is the transport's fast path. A call has three parts that a rank carries out in
this order: SAMPLE (choices for the logits that the previous step left on the device), STATE (free
slots, new slots, block appends), FORWARD (the rows of this step). Call N returns what step N-1
produced.

Everything that ranks could decide differently is in the message. It does not know what a request
is: a row names a *slot* of the rank's batch state and the slot's *generation*, which makes a late
result of a former owner recognisable.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tpinference_engine.errors import MessageCorrupt

LAYOUT_VERSION = 1
_INPUT_MAGIC = 0x5450_4901
_OUTPUT_MAGIC = 0x5450_4F01
NO_STEP = -1
MAX_STEP_ID = 2**31 - 1

Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A choice for one row of the logits that step N-1 left on the device, in their order."""

    slot: int
    generation: int
    position: int
    """Absolute index of the token to be chosen; its output index is position - prompt length."""


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A slot's first use by a request, or its next use after a preemption."""

    slot: int
    generation: int
    prompt_length: int
    """Tokens of the user's prompt: apart from what is replayed, which counts as output."""
    temperature: float
    """0 = greedy."""
    top_p: float
    top_k: int
    """0 = all of the vocabulary."""
    seed: int
    """64 bits, signed. Noise is a pure function of (seed, output index, vocabulary id)."""


@dataclass(frozen=True, slots=True)
class BlockAppend:
    """Blocks of the cache that follow the ones the slot has."""

    slot: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """`num_tokens` tokens of one slot, from absolute position `start`.

    `tokens` holds all of them (a chunk of a prompt or of a replay) or none: then num_tokens is 1
    and the rank gathers the token that the slot sampled last, on the device.
    """

    slot: int
    generation: int
    start: int
    num_tokens: int
    tokens: tuple[int, ...]
    wants_logits: bool
    """The last token's logits stay on the device, to be sampled by the next call."""


@dataclass(frozen=True, slots=True)
class StepInput:
    step_id: int
    epoch: int
    """Incarnation of the rank group. A rank of another epoch refuses the message."""
    bucket: int
    """Upper bound of the tokens in FORWARD, of a few sizes; 0 = a flush, nothing to run. A rank
    refuses rows that exceed it. On CUDA it names the captured graph of a step of decodes alone;
    any other step runs what its rows really have."""
    sample: tuple[SampleRow, ...] = ()
    free: tuple[int, ...] = ()
    new: tuple[NewSlot, ...] = ()
    appends: tuple[BlockAppend, ...] = ()
    forward: tuple[ForwardRow, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    slot: int
    generation: int
    position: int
    token: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A rank's acknowledgement of call N: all of N is queued and its own sample(N-1) has passed."""

    step_id: int
    epoch: int
    rank: int
    sampled_step_id: int
    """The step whose logits were sampled, NO_STEP if none were pending."""
    crc: int
    """`token_crc` of the sampled tokens. Ranks that differ have diverged: fatal for the group."""
    skew_us: int
    """How long the rank waited for the device, once all of the call was queued."""
    tokens: tuple[SampledToken, ...] = ()
    """From rank 0 alone; other ranks only acknowledge."""
    skews_us: tuple[int, ...] = ()
    """Of all ranks, in their order: filled in where the driver compares them, in no message."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What admission guarantees, so that no message outgrows its channel."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_blocks_per_slot: int

    @property
    def max_input_bytes(self) -> int:
        rows = self.max_num_seqs
        words = _HEADER_WORDS + rows * (3 + 1 + _NEW_WORDS + 2 + 6)
        # A slot gets all its blocks in one step when its prefix is cached.
        words += rows * self.max_blocks_per_slot + self.max_num_batched_tokens
        return 4 * words

    @property
    def max_output_bytes(self) -> int:
        return 4 * (_OUTPUT_HEADER_WORDS + 4 * self.max_num_seqs)

    def check_input(self, payload: bytes) -> None:
        """For the sender: a message that outgrows its channel never leaves."""
        if len(payload) > self.max_input_bytes:
            raise MessageCorrupt(
                f"step message has {len(payload)} bytes, its channel holds {self.max_input_bytes}"
            )


_HEADER_WORDS = 12
_NEW_WORDS = 8
_OUTPUT_HEADER_WORDS = 10


def next_step_id(step_id: int) -> int:
    """Step ids are one word: after 25 days of a step a millisecond they begin at 0 again."""
    return 0 if step_id == MAX_STEP_ID else step_id + 1


def previous_step_id(step_id: int) -> int:
    return MAX_STEP_ID if step_id == 0 else step_id - 1


def token_crc(tokens: Sequence[int]) -> int:
    """What every rank acknowledges of its sampled tokens, in the order of the SAMPLE rows."""
    return zlib.crc32(np.array(tokens, dtype=np.int32).tobytes())


def _float_word(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _word_float(word: int) -> float:
    return float(np.int32(word).view(np.float32))


def _seed_words(seed: int) -> tuple[int, int]:
    low, high = np.array([seed], dtype=np.int64).view(np.int32)
    return int(low), int(high)


def _words_seed(low: int, high: int) -> int:
    return int(np.array([low, high], dtype=np.int32).view(np.int64)[0])


def encode_input(step: StepInput) -> bytes:
    words: list[int] = [
        _INPUT_MAGIC, LAYOUT_VERSION, step.step_id, step.epoch, step.bucket,
        len(step.sample), len(step.free), len(step.new), len(step.appends), len(step.forward),
        sum(len(a.blocks) for a in step.appends), sum(len(r.tokens) for r in step.forward),
    ]  # fmt: skip
    for s in step.sample:
        words += (s.slot, s.generation, s.position)
    words += step.free
    for n in step.new:
        words += (n.slot, n.generation, n.prompt_length, _float_word(n.temperature))
        words += (_float_word(n.top_p), n.top_k, *_seed_words(n.seed))
    for a in step.appends:
        words += (a.slot, len(a.blocks))
    for r in step.forward:
        words += (r.slot, r.generation, r.start, r.num_tokens, len(r.tokens), int(r.wants_logits))
    for a in step.appends:
        words += a.blocks
    for r in step.forward:
        words += r.tokens
    return np.array(words, dtype=np.int32).tobytes()


class _Reader:
    """Takes runs of words off a message and refuses to read past its end."""

    def __init__(self, payload: bytes, magic: int) -> None:
        if len(payload) % 4 or len(payload) < 8:
            raise MessageCorrupt(f"step message of {len(payload)} bytes is no run of 32-bit words")
        self._words: list[int] = np.frombuffer(payload, dtype=np.int32).tolist()
        self._at = 0
        found_magic, version = self.take(2)
        if found_magic != magic or version != LAYOUT_VERSION:
            raise MessageCorrupt(
                f"step message has magic {found_magic:#x} and layout {version}, "
                f"expected {magic:#x} and {LAYOUT_VERSION}"
            )

    def take(self, count: int) -> list[int]:
        end = self._at + count
        if count < 0 or end > len(self._words):
            raise MessageCorrupt(f"step message ends at word {len(self._words)}, wanted {end}")
        run = self._words[self._at : end]
        self._at = end
        return run

    def rows(self, count: int, width: int) -> list[list[int]]:
        run = self.take(count * width)
        return [run[i : i + width] for i in range(0, len(run), width)]

    def finish(self) -> None:
        if self._at != len(self._words):
            raise MessageCorrupt(f"step message has {len(self._words) - self._at} words too many")


def decode_input(payload: bytes) -> StepInput:
    reader = _Reader(payload, _INPUT_MAGIC)
    step_id, epoch, bucket, *counts = reader.take(_HEADER_WORDS - 2)
    num_sample, num_free, num_new, num_appends, num_forward, _, _ = counts
    sample = tuple(SampleRow(*row) for row in reader.rows(num_sample, 3))
    free = tuple(reader.take(num_free))
    new = tuple(
        NewSlot(
            slot, generation, prompt, _word_float(temp), _word_float(top_p), top_k,
            _words_seed(low, high),
        )
        for slot, generation, prompt, temp, top_p, top_k, low, high in reader.rows(
            num_new, _NEW_WORDS
        )
    )  # fmt: skip
    append_rows = reader.rows(num_appends, 2)
    forward_rows = reader.rows(num_forward, 6)
    appends = tuple(BlockAppend(slot, tuple(reader.take(n))) for slot, n in append_rows)
    forward = tuple(
        ForwardRow(slot, generation, start, num_tokens, tuple(reader.take(sent)), bool(wants))
        for slot, generation, start, num_tokens, sent, wants in forward_rows
    )
    reader.finish()
    return StepInput(step_id, epoch, bucket, sample, free, new, appends, forward)


def encode_output(output: StepOutput) -> bytes:
    crc_word = int(np.array([output.crc], dtype=np.uint32).view(np.int32)[0])
    words: list[int] = [
        _OUTPUT_MAGIC, LAYOUT_VERSION, output.step_id, output.epoch, output.rank,
        output.sampled_step_id, crc_word, output.skew_us, len(output.tokens), 0,
    ]  # fmt: skip
    for t in output.tokens:
        words += (t.slot, t.generation, t.position, t.token)
    return np.array(words, dtype=np.int32).tobytes()


def decode_output(payload: bytes) -> StepOutput:
    reader = _Reader(payload, _OUTPUT_MAGIC)
    step_id, epoch, rank, sampled, crc_word, skew, count, _ = reader.take(_OUTPUT_HEADER_WORDS - 2)
    tokens = tuple(SampledToken(*row) for row in reader.rows(count, 4))
    reader.finish()
    crc = int(np.array([crc_word], dtype=np.int32).view(np.uint32)[0])
    return StepOutput(step_id, epoch, rank, sampled, crc, skew, tokens)
