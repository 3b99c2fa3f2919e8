"""Which parts of a rendered conversation somebody typed, over templates that trim, drop, repeat and change texts."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from server.tokenizer.spans import asked, spans
from server.tokenizer.template import Message

Render = Callable[[list[Message]], str]


def chat(change: Callable[[str], str] = lambda text: text) -> Render:
    return lambda messages: "".join(f"[{one['role']}]{change(one['content'])}[end]" for one in messages)


def star(text: str) -> bool:
    return "*" in text


def found(messages: list[Message], render: Render) -> list[str] | None:
    text = render(messages)
    ranges = spans(messages, text, star, render)
    return None if ranges is None else [text[low:high] for low, high in ranges]


MESSAGES: list[Message] = [
    {"role": "system", "content": "be *good*"},
    {"role": "user", "content": "be *good*"},
    {"role": "assistant", "content": "plain"},
    {"role": "user", "content": "  *spaces* around\n"},
]


def test_texts_are_found_where_they_stand() -> None:
    assert found(MESSAGES, chat()) == ["be *good*", "be *good*", "  *spaces* around\n"]
    first, second, _ = spans(MESSAGES, chat()(MESSAGES), star, chat()) or ()
    assert (first[0], second[0]) == (len("[system]"), len("[system]be *good*[end][user]"))


@pytest.mark.parametrize("trim", [str.strip, str.lstrip, str.rstrip])
def test_trimmed_texts_are_found(trim: Callable[[str], str]) -> None:
    assert found(MESSAGES, chat(trim)) == ["be *good*", "be *good*", trim("  *spaces* around\n")]


def test_dropped_and_repeated_texts_are_found_as_often_as_they_stand() -> None:
    assert found(MESSAGES, lambda messages: chat()(messages[1:2] * 2)) == ["be *good*", "be *good*"]


@pytest.mark.parametrize("change", [str.upper, lambda text: text.replace("*", "+"), lambda text: str(len(text))])
def test_changed_texts_cannot_be_told(change: Callable[[str], str]) -> None:
    assert found(MESSAGES, chat(change)) is None


def test_a_template_that_looks_into_a_text_cannot_be_told() -> None:
    def render(messages: list[Message]) -> str:
        return chat()(messages) + ("good" if any("good" in one["content"] for one in messages) else "bad")

    assert found(MESSAGES, render) is None


def test_markers_in_a_conversation_cannot_be_told() -> None:
    assert found([{"role": "user", "content": "* \ue0f00\ue0f1"}], chat()) is None


def test_names_count_and_roles_do_not() -> None:
    messages: list[Message] = [{"role": "*", "content": "x", "name": "a*"}]
    assert asked(messages, star)
    assert not asked([{"role": "*", "content": "x"}], star)
    assert found(messages, lambda given: f"{given[0]['role']}:{given[0]['name']}") == ["a*"]


def test_a_text_like_a_marker_of_another_number_changes_nothing() -> None:
    messages: list[Message] = [{"role": "user", "content": f"*{number}"} for number in range(12)]
    assert found(messages, chat()) == [f"*{number}" for number in range(12)]
    assert re.search("10", chat()(messages))
