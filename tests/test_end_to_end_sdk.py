"""OpenAI's own client, unchanged, against the server: calls, streams, and the exceptions it makes of our errors."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.byte_tokenizer import write_model
from tests.serving import DEADLINE_S, RunningServer

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(write_model(tmp_path_factory.mktemp("sdk") / "tiny")) as running:
        yield running


@pytest.fixture(scope="module")
def sdk(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


def test_a_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=9, temperature=0, seed=1, logprobs=True, top_logprobs=1,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.content
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 9
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_streamed_chat_is_the_whole_one(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(model="tiny", messages=HELLO, max_tokens=50, seed=4)
    chunks = list(
        sdk.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=50, seed=4, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason


def test_completions_of_text_and_ids(sdk: openai.OpenAI) -> None:
    whole = sdk.completions.create(model="tiny", prompt=[[1, 2], [3]], max_tokens=5, temperature=0, logprobs=1)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].logprobs is not None
    stream = sdk.completions.create(
        model="tiny", prompt="hello", max_tokens=7, stream=True, extra_body={"min_tokens": 7}
    )
    assert len([chunk for chunk in stream if chunk.choices]) == 7


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["tiny"]
    assert sdk.models.retrieve("tiny").owned_by == "deepinfer"


def test_errors_become_the_sdk_s_exceptions(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.chat.completions.create(model="tiny", messages=HELLO, temperature=7)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        sdk.completions.create(model="tiny", prompt=[1] * 9000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.chat.completions.create(model="other", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    assert unknown.value.request_id
    with pytest.raises(openai.NotFoundError):
        sdk.embeddings.create(model="tiny", input="hello")
