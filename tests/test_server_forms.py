"""The bytes of answers: streamed events are JSON that adds up to the whole answer, token by token."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.messages import Finish, TopLogprobs
from server.account import Call
from server.chat import ChatForm
from server.completions import TextForm
from server.config import Config
from server.envelope import Usage
from server.form import Form
from server.generate import Piece
from server.keys import Keys
from server.sse import DONE, event
from server.tokenizer.load import TextTokenizer, load
from tests import generations
from tests.byte_tokenizer import VOCAB_SIZE, write_model
from tests.local_server import NAME, services_of

USAGE = Usage(3, 4, 0)
# Batches of one answer's ids; bytes from 0x80 on make characters that are complete late, or never.
BATCHES = st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=5), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load(write_model(tmp_path_factory.mktemp("forms") / "bytes"))


def pieces_of(tokenizer: TextTokenizer, batches: list[list[int]], finish: Finish = Finish.LENGTH) -> list[list[Piece]]:
    """The pieces of an answer whose tokens came in these batches."""
    return asyncio.run(generations.pieces_of(tokenizer.pieces, batches, finish))


def events_of(data: bytes) -> list[Any]:
    """The JSON documents of server-sent events."""
    events = data.split(b"\n\n")
    assert events.pop() == b""
    assert all(one.startswith(b"data: ") and b"\n" not in one for one in events)
    return [msgspec.json.decode(one.removeprefix(b"data: ")) for one in events]


def streamed(form: Form, batches: list[list[Piece]], index: int = 0) -> list[dict[str, Any]]:
    opening = form.opening(index)
    return events_of(opening + b"".join(form.events(index, batch, None) for batch in batches))


def only_choice(chunk: dict[str, Any]) -> dict[str, Any]:
    (choice,) = chunk["choices"]
    assert isinstance(choice, dict)
    return choice


def forms(tokenizer: TextTokenizer, *, logprobs: bool = False) -> tuple[ChatForm, TextForm]:
    services = services_of(tokenizer, [], Keys(), Config(served_model_name=NAME))
    call = Call("id1", "test", "anonymous")
    return ChatForm(services, call, logprobs=logprobs), TextForm(services, call, logprobs=logprobs)


@given(batches=BATCHES, finish=st.sampled_from([Finish.STOP, Finish.LENGTH]), logprobs=st.booleans())
def test_the_streamed_text_is_the_whole_text(
    tokenizer: TextTokenizer, batches: list[list[int]], finish: Finish, logprobs: bool
) -> None:
    made = pieces_of(tokenizer, batches, finish)
    flat = [piece for batch in made for piece in batch]
    chat, text = forms(tokenizer, logprobs=logprobs)
    whole_chat = only_choice(msgspec.json.decode(chat.whole([flat], USAGE)))
    whole_text = only_choice(msgspec.json.decode(text.whole([flat], USAGE)))
    chat_choices = [only_choice(chunk) for chunk in streamed(chat, made)]
    text_choices = [only_choice(chunk) for chunk in streamed(text, made)]
    assert "".join(one["delta"].get("content", "") for one in chat_choices) == whole_chat["message"]["content"]
    assert "".join(one["text"] for one in text_choices) == whole_text["text"] == whole_chat["message"]["content"]
    assert whole_text["text"] == tokenizer.decode([id_ for batch in batches for id_ in batch])
    reason = {Finish.STOP: "stop", Finish.LENGTH: "length"}[finish]
    for choices in (chat_choices, text_choices):
        assert [one["finish_reason"] for one in choices] == [None] * (len(choices) - 1) + [reason]
    assert whole_chat["finish_reason"] == whole_text["finish_reason"] == reason


@given(batches=BATCHES)
def test_completions_stream_one_chunk_a_token_and_chats_none_without_text(
    tokenizer: TextTokenizer, batches: list[list[int]]
) -> None:
    made = pieces_of(tokenizer, batches)
    chat, text = forms(tokenizer)
    assert len(streamed(text, made)) == sum(map(len, batches))
    role, *chunks, last = (only_choice(chunk) for chunk in streamed(chat, made))
    assert role["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["delta"]["content"] for chunk in chunks)
    assert last["finish_reason"] == "length"


@given(batches=BATCHES)
def test_logprobs_line_up_with_tokens_and_offsets_with_the_text(
    tokenizer: TextTokenizer, batches: list[list[int]]
) -> None:
    made = pieces_of(tokenizer, batches)
    flat = [piece for batch in made for piece in batch]
    ids = [id_ for batch in batches for id_ in batch]
    chat, text = forms(tokenizer, logprobs=True)
    whole = only_choice(msgspec.json.decode(text.whole([flat], USAGE)))["logprobs"]
    assert whole.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert whole["tokens"] == [tokenizer.token_text(id_) for id_ in ids]
    assert whole["token_logprobs"] == [-0.5] * len(ids)
    assert whole["text_offset"] == list(itertools.accumulate((len(piece.text) for piece in flat[:-1]), initial=0))
    parts = [only_choice(chunk)["logprobs"] for chunk in streamed(text, made)]
    assert {name: [value for part in parts for value in part[name]] for name in whole} == whole
    content = only_choice(msgspec.json.decode(chat.whole([flat], USAGE)))["logprobs"]["content"]
    chunks = [only_choice(chunk)["logprobs"] for chunk in streamed(chat, made)[1:]]
    assert [entry for chunk in chunks for entry in chunk["content"]] == content
    assert [bytes(entry["bytes"]) for entry in content] == [tokenizer.token_bytes(id_) for id_ in ids]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


def test_a_text_that_two_ids_share_keeps_the_better_logprob(tokenizer: TextTokenizer) -> None:
    top = TopLogprobs(0, 1, 0, (0x80, 0x81), (-0.1, -0.2))  # both read U+FFFD
    piece = Piece(0x80, "\ufffd", -0.1, top, "length")
    whole = msgspec.json.decode(forms(tokenizer, logprobs=True)[1].whole([[piece]], USAGE))
    assert only_choice(whole)["logprobs"]["top_logprobs"] == [{"\ufffd": -0.1}]


def test_usage_and_head_are_the_same_in_every_chunk(tokenizer: TextTokenizer) -> None:
    made = pieces_of(tokenizer, [[104, 105]])
    chat, text = forms(tokenizer)
    heads: list[tuple[Form, str, str, str]] = [
        (chat, "chatcmpl-id1", "chat.completion", "chat.completion.chunk"),
        (text, "cmpl-id1", "text_completion", "text_completion"),
    ]
    for form, id_, document, part in heads:
        (usage,) = events_of(form.usage_event(USAGE))
        assert usage["choices"] == []
        counts = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        assert usage["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
        whole = msgspec.json.decode(form.whole([made[0]], USAGE))
        assert (whole["object"], whole["usage"]) == (document, usage["usage"])
        for chunk in (*streamed(form, made), usage):
            assert (chunk["id"], chunk["object"], chunk["model"]) == (id_, part, "tiny")
            assert chunk["created"] == whole["created"]


def test_each_chunk_can_carry_the_counts_up_to_it(tokenizer: TextTokenizer) -> None:
    made = pieces_of(tokenizer, [[104], [105, 106]])
    for form in forms(tokenizer):
        first = events_of(form.events(0, made[0], Usage(3, 0, 0)))
        rest = events_of(form.events(0, made[1], Usage(3, 1, 0)))
        assert [chunk["usage"]["completion_tokens"] for chunk in first + rest] == [1, 2, 3]
        assert {chunk["usage"]["prompt_tokens"] for chunk in first + rest} == {3}


@given(batches=BATCHES, index=st.integers(0, 300))
def test_a_writer_s_events_are_those_of_the_pieces(
    tokenizer: TextTokenizer, batches: list[list[int]], index: int
) -> None:
    made = pieces_of(tokenizer, batches)
    for form in forms(tokenizer):
        *ids, last = [id_ for batch in batches for id_ in batch]
        writer = form.writer(index)
        assert writer is not None
        fast = writer.push(np.array(ids, np.int32)) + form.last(index, writer.text(last) + writer.flush(), "length")
        assert fast == b"".join(form.events(index, batch, None) for batch in made)
    for form in forms(tokenizer, logprobs=True):
        assert form.writer(index) is None


def test_several_choices_keep_their_indexes(tokenizer: TextTokenizer) -> None:
    made = pieces_of(tokenizer, [[104], [105]])
    _, text = forms(tokenizer, logprobs=True)
    chunks = streamed(text, made, 1) + streamed(text, made, 0)
    assert [only_choice(chunk)["index"] for chunk in chunks] == [1, 1, 0, 0]
    assert [only_choice(chunk)["logprobs"]["text_offset"] for chunk in chunks] == [[0], [1], [0], [1]]
    whole = msgspec.json.decode(text.whole([made[0], [*made[0], *made[1]]], USAGE))
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [(0, "h"), (1, "hi")]


def test_an_event_is_one_line_of_data() -> None:
    assert event(b'{"a":"\\n"}') == b'data: {"a":"\\n"}\n\n'
    assert DONE == b"data: [DONE]\n\n"
