"""A request as the engine knows it, and what comes back: token ids only, no text.

These types cross from the API server to the engine core (msgspec), so they hold plain data. Text,
templates and stop *strings* stay in the API server; a stop string found there arrives as an abort.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    STOP = "stop"
    """An end-of-sequence or stop token."""
    LENGTH = "length"
    """max_tokens or the model's length."""
    ABORT = "abort"
    """The client went away, a stop string was found, or the drain deadline passed."""
    DEADLINE = "deadline"
    """`Request.deadline` passed; `error` says so."""
    ERROR = "error"
    """The engine failed; `error` says how."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    max_tokens: int
    """Output tokens at most, at least 1."""
    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = no limit."""
    seed: int | None = None
    """None gets one at admission, so that a replay repeats it."""
    stop_token_ids: tuple[int, ...] = ()
    """End the output, besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    """Lower goes first; only 0 unless the scheduling policy is `priority`."""
    cache_salt: str | None = None
    """Only requests with the same one find each other's prefixes in the cache."""
    deadline: float | None = None
    """By the monotonic clock of the machine, which the API server and the core share."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request that are new since its last output. Accepted tokens never change."""

    request_id: str
    token_ids: tuple[int, ...]
    """The token that ends a request for STOP is counted in usage and not shown; it is included."""
    finish_reason: FinishReason | None = None
    error: str | None = None
