"""Messages to a prompt, by the template that comes with the model.

A template is code from the model's makers, fed with text from strangers: it runs in a sandbox that
can change nothing. The names it may use are those that Hugging Face's templates use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from tpinference_engine.errors import InvalidModel, RequestRefused

Message = Mapping[str, Any]

_RESERVED = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token"})


class _GenerationMark(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; for a prompt it is its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(value: Any, indent: int | None = None) -> str:
    """Unlike jinja2's own filter it escapes nothing for HTML: a prompt is no page."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationMark, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    def __init__(self, source: str, marks: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidModel(
                f"chat template has an error in line {error.lineno}: {error}"
            ) from error
        self._marks = dict(marks)

    def render(self, messages: Sequence[Message], extra: Mapping[str, Any]) -> str:
        """The prompt, up to where the assistant goes on."""
        taken = sorted(_RESERVED & extra.keys())
        if taken:
            raise RequestRefused(
                f"chat_template_kwargs has {taken!r}, which the server sets itself",
                param="chat_template_kwargs",
                code="invalid_value",
            )
        names = {**self._marks, **extra, "messages": messages, "add_generation_prompt": True}
        try:
            return self._template.render(names)
        # A template fails on messages of a form it was not written for in whatever way Python does.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RequestRefused(
                f"the model's chat template refuses these messages: {error}",
                param="messages",
                code="chat_template_refused",
            ) from error


def _mark(value: object) -> str:
    """A special token of tokenizer_config.json: text, or an object that holds it."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _template_source(model: Path, config: Mapping[str, Any]) -> str | None:
    path = model / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    declared = config.get("chat_template")
    if isinstance(declared, list):
        named = {entry["name"]: entry["template"] for entry in declared}
        declared = named.get("default")
    return declared if isinstance(declared, str) else None


def load_chat_template(model: Path) -> ChatTemplate | None:
    """None if the model has none: it can complete, not chat."""
    path = model / "tokenizer_config.json"
    try:
        config = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise InvalidModel(f"file {str(path)!r} is no JSON: {error}") from error
    source = _template_source(model, config)
    if source is None:
        return None
    marks = {name: _mark(config.get(name)) for name in ("bos_token", "eos_token", "unk_token")}
    return ChatTemplate(source, marks)
