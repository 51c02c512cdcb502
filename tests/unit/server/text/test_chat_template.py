"""Chats rendered by models' templates, and what a template is not allowed to do."""

from __future__ import annotations

from datetime import datetime

import pytest

from penstock.server.text.chat_template import ChatMessage, ChatTemplate
from penstock.server.text.errors import ChatTemplateError, ModelFilesError

HELLO = (ChatMessage(role="user", content="hello"),)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(
        source,
        special_tokens={"bos_token": "<s>"},
        local_time=lambda: datetime(2020, 2, 3),
    )


def render(source: str, messages: tuple[ChatMessage, ...] = HELLO, max_bytes: int = 1000) -> str:
    return template(source).render(messages, add_generation_prompt=True, max_bytes=max_bytes)


def test_renders_as_templates_expect() -> None:
    source = """
{%- for message in messages %}
    {%- if loop.index0 == 1 %}{% continue %}{% endif %}
    {% if true %}
[{{ message['role'] }}:{{ message.content | tojson }}]
    {% endif %}
{%- endfor %}
{{ bos_token }}{{ strftime_now('%d %b') }}{{ tools is none }}{{ add_generation_prompt }}"""
    messages = (
        ChatMessage(role="user", content="a <b> 'c' é"),
        ChatMessage(role="assistant", content="skipped"),
        ChatMessage(role="user", content="d"),
    )
    assert render(source, messages) == ('[user:"a <b> \'c\' é"]\n[user:"d"]\n<s>03 FebTrueTrue')


def test_generation_blocks_print_their_body() -> None:
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahellob"


def test_rejections_by_the_template_have_its_message() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_rejections_never_quote_the_conversation() -> None:
    with pytest.raises(ChatTemplateError) as raised:
        render("{{ raise_exception('bad: ' + messages[0].content) }}")
    assert "hello" not in str(raised.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content.x }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content.__class__.__base__.__subclasses__() }}",
    ],
)
def test_failures_and_escapes_are_safe_errors(source: str) -> None:
    with pytest.raises(ChatTemplateError) as raised:
        render(source)
    assert "hello" not in str(raised.value)


@pytest.mark.parametrize(
    "source", ["{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}", "{{ 'é' * 60 }}"]
)
def test_output_is_bounded_in_bytes(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="longer than 100 bytes"):
        render(source, max_bytes=100)


def test_a_broken_template_is_the_operators_error() -> None:
    with pytest.raises(ModelFilesError, match="line 2"):
        template("ok\n{% for %}")
