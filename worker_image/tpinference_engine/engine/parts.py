"""Makes what an engine core runs on: an executor, and the facts of the model that bound requests.

Called in the core's own process, so that Ray and torch are imported and initialised there and
nowhere else. A function of this module is what is handed to that process by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tpinference_engine.config import EngineConfig
from tpinference_engine.executor.base import Executor
from tpinference_engine.executor.factory import make_executor
from tpinference_engine.model.config import read_model_config
from tpinference_engine.model.weight_files import check_weight_files
from tpinference_engine.runner import echo


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    executor: Executor
    model: ModelFacts


BuildParts = Callable[[EngineConfig], EngineParts]
"""Raises TPInferenceError. A function of a module, so that a process can be told its name."""


def build_parts(config: EngineConfig) -> EngineParts:
    """The real thing: the model directory on the backend that the config names."""
    model = read_model_config(config.model)
    # Ranks would tell it too, but only once Ray and all of them are up.
    check_weight_files(config.model)
    max_model_len = model.limit_model_len(config.max_model_len)
    return EngineParts(
        executor=make_executor(config, max_model_len),
        model=ModelFacts(
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            max_model_len=max_model_len,
        ),
    )


def build_echo_parts(config: EngineConfig) -> EngineParts:
    """No model: ranks whose tokens are a hash of what their cache gives back. For tests."""
    max_model_len = config.max_model_len or echo.DEFAULT_MAX_MODEL_LEN
    return EngineParts(
        executor=make_executor(config, max_model_len, echo.EchoRunner),
        model=ModelFacts(
            vocab_size=echo.DEFAULT_VOCAB_SIZE, eos_token_ids=(), max_model_len=max_model_len
        ),
    )
