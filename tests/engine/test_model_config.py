"""config.json is read as transformers would, and what can't be served is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tpinference_engine.errors import InvalidConfig, InvalidModel
from tpinference_engine.model.config import ModelConfig, RopeConfig, read_model_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}

Read = Callable[..., ModelConfig]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(generation: object = None, **changes: object) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps({**BASE, **changes}))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_model_config(tmp_path)

    return read


def test_older_and_newer_spellings_mean_the_same(read: Read) -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_type": "llama3",
    }
    old = read(rope_theta=5e5, rope_scaling=llama3)
    new = read(torch_dtype=None, dtype="bfloat16", rope_parameters={**llama3, "rope_theta": 5e5})
    assert old == new
    assert new.rope == RopeConfig(
        theta=5e5,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=128,
    )


def test_defaults_are_those_of_transformers(read: Read) -> None:
    config = read(num_key_value_heads=None, torch_dtype=None)
    assert (config.num_kv_heads, config.head_dim, config.dtype) == (8, 8, "float32")
    assert config.rope == RopeConfig(theta=10000.0)
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("architecture", "biases"),
    [
        ("LlamaForCausalLM", (True, True, False)),
        ("MistralForCausalLM", (False, False, False)),
        ("Qwen2ForCausalLM", (True, False, False)),
        ("Qwen3ForCausalLM", (True, True, True)),
    ],
)
def test_families_differ_in_biases_and_norms(
    read: Read, architecture: str, biases: tuple[bool, bool, bool]
) -> None:
    config = read(architectures=[architecture], attention_bias=True)
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == biases


def test_end_tokens_and_defaults_come_from_the_generation_config(read: Read) -> None:
    config = read({"eos_token_id": [3, 4], "temperature": 0.6, "top_p": 0.9, "top_k": 20})
    assert config.eos_token_ids == (3, 4)
    defaults = config.generation
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.6, 0.9, 20)
    assert read({}).eos_token_ids == (2,)


def test_sliding_window_limits_the_length_unless_switched_off(read: Read) -> None:
    assert read(sliding_window=256).max_position == 256
    assert read(sliding_window=256, use_sliding_window=False).max_position == 512
    assert read(sliding_window=None).max_position == 512


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_window_of_qwen_is_off_unless_it_is_switched_on(read: Read, architecture: str) -> None:
    """As transformers has it: without the switch its configs drop the window."""
    fields = {"architectures": [architecture], "sliding_window": 256}
    assert read(**fields).max_position == 512
    assert read(**fields, use_sliding_window=None).max_position == 512
    assert read(**fields, use_sliding_window=False).max_position == 512
    assert read(**fields, use_sliding_window=True).max_position == 256
    with pytest.raises(InvalidModel, match="use_sliding_window is 'on', must be true or false"):
        read(**fields, use_sliding_window="on")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures is \['GPT2LMHeadModel'\].*Qwen3"),
        ({"architectures": None}, "architectures is None, must be one of .*LlamaForCausalLM"),
        ({"hidden_size": None}, "hidden_size is None, must be an integer of at least 1"),
        ({"vocab_size": "many"}, "vocab_size is 'many', must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, must be an integer of at least 1"),
        ({"num_attention_heads": True}, "num_attention_heads is True, must be an integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 8, must be a multiple .* 3"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1, must be a number above 0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', must be 'silu'"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8', must be one of"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', must be true or false"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'.*llama3"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is None"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\], must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, must be 1.0"),
        ({"quantization_config": {"bits": 4}}, "quantized weights are not supported"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id is .*, must be a token id or a list"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_field_that_can_not_be_served_is_named(
    read: Read, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidModel, match=message):
        read(**changes)


def test_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="does not exist"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(InvalidModel, match="config.json.* is missing"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_unreadable_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(InvalidModel, match="config.json"):
        read_model_config(tmp_path)


def test_length_is_limited_by_the_model(read: Read) -> None:
    config = read()
    assert (config.limit_model_len(None), config.limit_model_len(100)) == (512, 100)
    for wanted in (0, 513):
        with pytest.raises(InvalidConfig, match=f"max_model_len is {wanted}.*1 to 512"):
            config.limit_model_len(wanted)


def test_auto_dtype_is_the_checkpoints(read: Read) -> None:
    assert read().choose_dtype("auto") == "bfloat16"
    assert read().choose_dtype("float32") == "float32"


def test_reading_a_config_imports_no_torch() -> None:
    program = "import sys, tpinference_engine.model.config, tpinference_engine.worker; "
    program += "sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
