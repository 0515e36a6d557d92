"""Messages to a prompt, and what a template may say no to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpinference_engine.errors import InvalidModel, RequestRefused
from tpinference_engine.server.chat_template import ChatTemplate, load_chat_template

HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, extra: dict[str, object] | None = None) -> str:
    marks = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(source, marks).render(HELLO, extra or {})


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hello</s>"),
        ("{% if add_generation_prompt %}assistant:{% endif %}", "assistant:"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hello"}]'),
        ("{{ {'a': '<\u00e9>'} | tojson(indent=1) }}", '{\n "a": "<\u00e9>"\n}'),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{% for m in messages * 3 %}{% if loop.last %}{% break %}{% endif %}x{% endfor %}", "xx"),
        ("  {% if true %}\n  kept\n  {% endif %}\n", "  kept\n"),
    ],
    ids=["marks", "prompt", "tojson", "tojson indent", "generation", "break", "blocks"],
)
def test_template_has_the_names_it_expects(source: str, prompt: str) -> None:
    assert render(source) == prompt


def test_template_may_ask_the_date() -> None:
    year = render("{{ strftime_now('%Y') }}")
    assert year.isdecimal() and int(year) > 2000


def test_extra_names_reach_the_template() -> None:
    assert render("{{ enable_thinking }}", {"enable_thinking": False}) == "False"


def test_extra_names_can_not_replace_the_messages() -> None:
    with pytest.raises(RequestRefused, match="messages") as refused:
        render("x", {"messages": []})
    assert refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 'a' + none }}", "concatenate"),
        ("{{ messages[5].role.x }}", "no element 5"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
    ids=["refuses", "type", "index", "escape", "change"],
)
def test_template_that_fails_is_the_request_s_fault(source: str, says: str) -> None:
    with pytest.raises(RequestRefused, match=says) as refused:
        render(source)
    assert refused.value.param == "messages"


def test_template_that_can_not_be_read_is_the_model_s_fault() -> None:
    with pytest.raises(InvalidModel, match="line 1"):
        ChatTemplate("{% if %}", {})


def write(directory: Path, config: object, template: str | None = None) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def loaded(directory: Path) -> str:
    template = load_chat_template(directory)
    assert template is not None
    return template.render(HELLO, {})


def test_template_of_its_own_file_goes_first(tmp_path: Path) -> None:
    assert loaded(write(tmp_path, {"chat_template": "config"}, "file")) == "file"


def test_template_in_the_config(tmp_path: Path) -> None:
    config = {"chat_template": "{{ bos_token }}", "bos_token": {"content": "<s>"}}
    assert loaded(write(tmp_path, config)) == "<s>"


def test_default_of_several_templates(tmp_path: Path) -> None:
    several = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert loaded(write(tmp_path, {"chat_template": several})) == "d"


def test_model_without_a_template(tmp_path: Path) -> None:
    assert load_chat_template(write(tmp_path, {})) is None
    assert load_chat_template(tmp_path / "missing") is None


def test_config_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InvalidModel, match="no JSON"):
        load_chat_template(tmp_path)
