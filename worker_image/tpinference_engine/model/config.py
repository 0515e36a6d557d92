"""What a model directory says about itself: config.json and generation_config.json.

Pure: no torch, no tensors, no file but those two. What can't be served is refused here, before any
weight is read, with the field, its value and what is allowed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from tpinference_engine.config import Dtype
from tpinference_engine.errors import InvalidConfig, InvalidModel

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

RopeKind = Literal["default", "linear", "llama3"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3")
TorchDtype = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[TorchDtype, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """In what an architecture differs from Llama."""

    qkv_bias: bool | None = None
    """None = config.json's attention_bias."""
    o_bias: bool | None = None
    qk_norm: bool = False
    """Each head's query and key are normed before the rotation."""
    has_window_switch: bool = False
    """A sliding_window counts only where use_sliding_window is true."""


FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(qkv_bias=False, o_bias=False),
    "Qwen2ForCausalLM": Family(qkv_bias=True, o_bias=False, has_window_switch=True),
    "Qwen3ForCausalLM": Family(qk_norm=True, has_window_switch=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    """Of llama3: the length the model was trained for before it was stretched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling that the model's makers recommend, where a request says nothing. None = nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    """Tokens of prompt and output together at most."""
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: TorchDtype
    """Of the checkpoint."""
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults

    def limit_model_len(self, wanted: int | None) -> int:
        """The length to serve: what was asked for, if the model can do it."""
        if wanted is None:
            return self.max_position
        if not 1 <= wanted <= self.max_position:
            raise InvalidConfig(
                f"max_model_len is {wanted!r}, the model allows 1 to {self.max_position}"
            )
        return wanted

    def choose_dtype(self, wanted: Dtype) -> TorchDtype:
        return self.dtype if wanted == "auto" else wanted


def read_model_config(directory: Path) -> ModelConfig:
    """Raises InvalidModel for anything that can't be read or is not supported."""
    if not directory.is_dir():
        raise InvalidModel(f"model directory {str(directory)!r} does not exist")
    fields = _Fields(CONFIG_FILE, _read_json(directory / CONFIG_FILE))
    generation = _Fields(
        GENERATION_FILE,
        _read_json(directory / GENERATION_FILE) if (directory / GENERATION_FILE).exists() else {},
    )
    architecture = _architecture(fields)
    _refuse_unsupported(fields)
    family = FAMILIES[architecture]
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise InvalidModel(
            f"{CONFIG_FILE}: num_attention_heads is {heads}, "
            f"must be a multiple of num_key_value_heads {kv_heads}"
        )
    hidden = fields.integer("hidden_size")
    attention_bias = fields.flag("attention_bias")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.integer("head_dim", hidden // heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        max_position=_max_position(fields, family),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=fields.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        dtype=_dtype(fields),
        eos_token_ids=generation.token_ids("eos_token_id") or fields.token_ids("eos_token_id"),
        generation=GenerationDefaults(
            temperature=generation.optional_number("temperature"),
            top_p=generation.optional_number("top_p"),
            top_k=generation.optional_integer("top_k"),
        ),
    )


class _Fields:
    """Typed access to one JSON object; a null counts as absent, as in transformers."""

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        self.name = name
        self._values = values

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def optional_integer(self, key: str) -> int | None:
        value = self.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.wrong(key, "an integer")
        return value

    def optional_number(self, key: str) -> float | None:
        value = self.get(key)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise self.wrong(key, "a number")
        return None if value is None else float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        found = self.optional_integer(key)
        value = default if found is None else found
        if value is None or value < 1:
            raise self.wrong(key, "an integer of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        found = self.optional_number(key)
        value = default if found is None else found
        if value is None or not value > 0:
            raise self.wrong(key, "a number above 0")
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value not in (None, True, False):
            raise self.wrong(key, "true or false")
        return bool(value)

    def object(self, key: str) -> _Fields:
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return _Fields(f"{self.name}: {key}", value or {})

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(not isinstance(token, int) or token < 0 for token in ids):
            raise self.wrong(key, "a token id or a list of them")
        return tuple(ids)

    def wrong(self, key: str, allowed: str) -> InvalidModel:
        return InvalidModel(f"{self.name}: {key} is {self.get(key)!r}, must be {allowed}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise InvalidModel(f"{str(path)!r} is missing: not a model directory") from error
    except (OSError, ValueError) as error:
        raise InvalidModel(f"{str(path)!r} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidModel(f"{str(path)!r} is no JSON object")
    return found


def _architecture(fields: _Fields) -> str:
    named = fields.get("architectures")
    for name in named if isinstance(named, list) else []:
        if name in FAMILIES:
            return str(name)
    raise fields.wrong("architectures", f"one of {sorted(FAMILIES)!r}")


def _refuse_unsupported(fields: _Fields) -> None:
    if fields.get("quantization_config"):
        raise fields.wrong("quantization_config", "absent: quantized weights are not supported")
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.wrong("hidden_act", "'silu'")


def _max_position(fields: _Fields, family: Family) -> int:
    """Within the sliding window full attention is the same, so the window is the limit."""
    longest = fields.integer("max_position_embeddings", 2048)
    window = fields.optional_integer("sliding_window")
    # Qwen carries a window that is off unless it is switched on; Mistral has no switch.
    is_on = fields.flag("use_sliding_window")
    if fields.get("use_sliding_window") is None:
        is_on = not family.has_window_switch
    return min(longest, window) if window is not None and is_on else longest


def _rope(fields: _Fields) -> RopeConfig:
    # transformers 5 writes rope_parameters; older ones rope_theta beside rope_scaling.
    key = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    rope = fields.object(key)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise InvalidModel(f"{rope.name}: rope_type is {kind!r}, must be one of {ROPE_KINDS!r}")
    share = rope.optional_number("partial_rotary_factor")
    share = fields.optional_number("partial_rotary_factor") if share is None else share
    if share not in (None, 1.0):
        raise InvalidModel(f"{CONFIG_FILE}: partial_rotary_factor is {share!r}, must be 1.0")
    theta = rope.optional_number("rope_theta")
    llama3 = kind == "llama3"
    return RopeConfig(
        theta=fields.number("rope_theta", 10000.0) if theta is None else theta,
        kind=kind,
        factor=1.0 if kind == "default" else rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor") if llama3 else 1.0,
        high_freq_factor=rope.number("high_freq_factor") if llama3 else 1.0,
        original_max_position=rope.integer("original_max_position_embeddings") if llama3 else 0,
    )


def _dtype(fields: _Fields) -> TorchDtype:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(key)
    if value is None:
        return "float32"
    if value not in DTYPES:
        raise fields.wrong(key, f"one of {DTYPES!r}")
    return cast(TorchDtype, value)
