"""A tokenizer whose ids are bytes, and an engine that says what a test tells it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from tpinference_engine.model.config import GenerationDefaults
from tpinference_engine.request import FinishReason, Request, RequestOutput
from tpinference_engine.server.chat_template import ChatTemplate
from tpinference_engine.server.gate import Gate
from tpinference_engine.server.generation_route import Serving
from tpinference_engine.server.listener import Listener, reserve_port
from tpinference_engine.server.metrics import Metrics
from tpinference_engine.server.openai_app import openai_app
from tpinference_engine.server.plan import ServedModel
from tpinference_engine.server.tokenizer import Tokenizer
from tpinference_engine.server.vocabulary import BYTE_OF_CHARACTER

EOS = 256
WORDS = ("DEF", "HI", "beta ", "gamma delta", "\r\n\r\ndata: x")
TEMPLATE = (
    "{% for m in messages %}{{ raise_exception('no robots') if m.content == 'robot' }}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

Script = Callable[[Request], AsyncGenerator[RequestOutput, None]]


def _byte_tokenizer() -> HFTokenizer:
    """Ids 0 to 255 are the bytes, 256 is the end, then a few words for tests of the cut."""
    vocab = dict(BYTE_OF_CHARACTER)
    character_of = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    for at, word in enumerate(WORDS):
        vocab["".join(character_of[byte] for byte in word.encode())] = EOS + 1 + at
    vocab["<|end|>"] = EOS
    tokenizer = HFTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


class ScriptedEngine:
    """The engine as the server sees it. `script` makes a request's outputs."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.running: set[str] = set()
        self._changed = asyncio.Event()

    async def wait_running(self, num_requests: int) -> None:
        async with asyncio.timeout(5):
            while len(self.running) != num_requests:
                self._changed.clear()
                await self._changed.wait()

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        self.requests.append(request)
        self.running.add(request.request_id)
        self._changed.set()
        ended = False
        try:
            async for output in self.script(request):
                ended = output.finish_reason is not None
                yield output
        finally:
            self.running.discard(request.request_id)
            self._changed.set()
            if not ended:
                self.aborted.append(request.request_id)


def say(*token_ids: int, reason: FinishReason = FinishReason.STOP) -> Script:
    """One token an output; the last one carries the reason."""

    async def script(request: Request) -> AsyncGenerator[RequestOutput, None]:
        for at, token_id in enumerate(token_ids):
            end = reason if at == len(token_ids) - 1 else None
            yield RequestOutput(
                request_id=request.request_id, token_ids=(token_id,), finish_reason=end
            )

    return script


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(_byte_tokenizer())


@pytest.fixture
def served_model(tokenizer: Tokenizer) -> ServedModel:
    return ServedModel(
        names=("tiny", "tiny-alias"),
        tokenizer=tokenizer,
        chat_template=ChatTemplate(TEMPLATE, {"bos_token": "", "eos_token": "<|end|>"}),
        max_model_len=64,
        vocab_size=EOS + 1 + len(WORDS),
        defaults=GenerationDefaults(),
        created=1_700_000_000,
    )


@pytest.fixture
def word_ids() -> dict[str, int]:
    return {word: EOS + 1 + at for at, word in enumerate(WORDS)}


@pytest.fixture
def served_directory(tmp_path: Path) -> Path:
    """A model directory without weights: all that a server reads."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 256,
        "eos_token_id": EOS,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    _byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def end_id() -> int:
    return EOS


@pytest.fixture
def saying() -> Callable[..., Script]:
    return say


@pytest.fixture
def scripted() -> Callable[[Script], ScriptedEngine]:
    return ScriptedEngine


class ScriptedApp:
    """The OpenAI application over a scripted engine."""

    def __init__(self, engine: ScriptedEngine, serving: Serving) -> None:
        self.engine = engine
        self.serving = serving
        self.app = openai_app(serving)

    def in_memory(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test")

    async def wait_idle(self) -> None:
        """Nothing runs any more, neither here nor in the engine."""
        async with asyncio.timeout(2):
            await self.serving.gate.wait_empty()
        assert not self.engine.running


class ServedApp(ScriptedApp):
    """It behind a real port, with the client that users have."""

    def connect(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.client = AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def script_app(
    served_model: ServedModel,
) -> Callable[..., AbstractAsyncContextManager[ScriptedApp]]:
    @asynccontextmanager
    async def make(
        script: Script, *, max_requests: int = 100, **changes: object
    ) -> AsyncIterator[ScriptedApp]:
        engine = ScriptedEngine(script)
        model = replace(served_model, **changes)  # type: ignore[arg-type]
        yield ScriptedApp(engine, Serving(engine, model, Gate(max_requests), Metrics(dict, "tiny")))

    return make


@pytest.fixture
def serve_script(
    served_model: ServedModel,
) -> Callable[..., AbstractAsyncContextManager[ServedApp]]:
    @asynccontextmanager
    async def serve(script: Script, *, max_requests: int = 100) -> AsyncIterator[ServedApp]:
        engine = ScriptedEngine(script)
        serving = Serving(engine, served_model, Gate(max_requests), Metrics(dict, "tiny"))
        served = ServedApp(engine, serving)
        listener = Listener(served.app, reserve_port("port", "127.0.0.1", 0), access_log=False)
        served.connect(listener.port)
        try:
            yield served
        finally:
            await served.client.close()
            await listener.close()

    return serve
