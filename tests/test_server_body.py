"""What a body may be: whatever it holds, it becomes a typed request or an error that names the field."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.body import QUOTED_CHARS, parse
from server.errors import ApiError, InvalidRequestError, UnsupportedFieldError
from server.fields import LABELS, UNSERVED, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

KINDS: list[type[msgspec.Struct]] = [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]
HELLO = [{"role": "user", "content": "hello"}]

_names = [field.encode_name for kind in KINDS for field in msgspec.structs.fields(kind)]
_keys = st.sampled_from([*_names, *UNSERVED, *LABELS, "role", "content", "type", "text"]) | st.text(max_size=8)
_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[]))
_values = st.recursive(
    _scalars | st.sampled_from([10**30, -(10**400), "user", "text"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_keys, inner, max_size=4),
    max_leaves=12,
)


def chat(**fields: object) -> ChatRequest:
    return parse(json.dumps({"messages": HELLO, **fields}).encode(), ChatRequest)


def refused(kind: type[msgspec.Struct], body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body, kind)
    assert caught.value.status == 400
    caught.value.body()  # whatever was quoted can be sent
    return caught.value


def refused_chat(**fields: object) -> ApiError:
    return refused(ChatRequest, json.dumps({"messages": HELLO, **fields}).encode())


@given(kind=st.sampled_from(KINDS), fields=st.dictionaries(_keys, _values, max_size=6), hello=st.booleans())
def test_any_object_is_a_request_or_an_api_error(
    kind: type[msgspec.Struct], fields: dict[str, Any], hello: bool
) -> None:
    body = json.dumps({**({"messages": HELLO, "prompt": "hello"} if hello else {}), **fields}).encode()
    with contextlib.suppress(ApiError):
        assert isinstance(parse(body, kind), kind)
        return
    refused(kind, body)


@given(st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
def test_any_bytes_are_a_request_or_an_api_error(body: bytes) -> None:
    refused(ChatRequest, body)


@pytest.mark.parametrize("field", ["temperature", "messages", "stop", "logit_bias", "nobody_knows"])
def test_every_depth_of_nesting_is_refused(field: str) -> None:
    # Between what the decoder takes and what it refuses lie depths at which quoting the value would fail.
    for depth in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit() + 5):
        refused(ChatRequest, b'{"messages":[],"%b":%b%b}' % (field.encode(), b"[" * depth, b"]" * depth))


@pytest.mark.parametrize("body", [b"", b"{", b'{"a":1,}', b"\xff", b'{"prompt":"\xff"}', b"{'prompt':1}", b"NaN"])
def test_malformed_json_is_named_as_such(body: bytes) -> None:
    assert refused(ChatRequest, body).message.startswith("the body is not valid JSON: ")


@pytest.mark.parametrize("text", [r'"\ud800"', r'"\udc00 tail"', r'"\ud800A"'])
def test_half_a_surrogate_pair_is_no_text(text: str) -> None:
    assert "not valid JSON" in refused(CompletionRequest, b'{"prompt":%b}' % text.encode()).message


@pytest.mark.parametrize("body", [b"[]", b"null", b"1", b'"text"', b"true"])
def test_the_top_must_be_an_object(body: bytes) -> None:
    assert refused(ChatRequest, body).message == f"the body must be a JSON object, got {body.decode()}"


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0, 2, 0.5], [-0.1, 2.1, "hot", True, [1]]),
        ("top_p", [1, 0.001], [0, 1.1, "1"]),
        ("top_k", [-1, 0, 50], [-2, 1.5, 2**70]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("seed", [-(2**63), 2**63 - 1, 0], [2**63, -(2**63) - 1, 10**30, "0", 0.5]),
        ("max_tokens", [1, 2**31 - 1], [0, -1, 2**31, "4", 1.5]),
        ("max_completion_tokens", [1], [0, "4"]),
        ("min_tokens", [0, 5], [-1]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.1, 10], [0, 10.1]),
        ("top_logprobs", [0, 20], [-1, 21]),
        ("logit_bias", [{}, {"5": -100, "6": 100}], [{"5": 101}, {"5": "x"}, []]),
        ("stream", [True, False], [1, "true"]),
        ("stream_options", [{"include_usage": True}], [{"include_usage": 1}, {"other": 1}, True]),
        ("ignore_eos", [True], ["yes"]),
        ("model", ["", "x"], [1, ["x"]]),
        ("prefix_cache", [False], [0]),
    ],
)
def test_a_field_s_range_and_what_its_refusal_says(field: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        chat(**{field: value})
    for value in bad:
        error = refused_chat(**{field: value})
        assert isinstance(error, InvalidRequestError)
        assert field in error.message
        assert error.param is not None
        assert error.param.startswith(field)


def test_a_refusal_quotes_the_value_and_cuts_a_long_one() -> None:
    assert refused_chat(temperature=3).message.endswith("got 3")
    message = refused_chat(temperature="x" * 1000).message
    assert message == 'temperature: Expected `float`, got `str` "' + "x" * (QUOTED_CHARS - 1) + "..."


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{}", "messages"),
        (b'{"messages":[]}', "messages"),
        (b'{"messages":null}', "messages"),
        (b'{"messages":[{"content":"x"}]}', "messages[0]"),
        (b'{"messages":[{"role":"robot","content":"x"}]}', "messages[0].role"),
        (b'{"messages":[{"role":"user","content":5}]}', "messages[0].content"),
        (b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":""}]}]}', "messages[0].content[0]"),
        (b'{"messages":[7]}', "messages[0]"),
        (b'{"messages":{"role":"user"}}', "messages"),
    ],
)
def test_wrong_messages_are_named_by_place(body: bytes, param: str) -> None:
    error = refused(ChatRequest, body)
    assert param in error.message
    assert (error.param or param).startswith(param)


def test_null_is_as_if_absent_in_requests_and_messages() -> None:
    nulls = dict.fromkeys([*(field for field in _names if field not in ("messages", "prompt", "tokens")), *UNSERVED])
    body = {**nulls, "messages": [{"role": "assistant", "content": None, "tool_calls": None, "name": None}]}
    for gone in ("prompt", "tokens"):
        body.pop(gone, None)
    known = {field.encode_name for field in msgspec.structs.fields(ChatRequest)} | set(UNSERVED)
    request = parse(json.dumps({name: value for name, value in body.items() if name in known}).encode(), ChatRequest)
    assert request.temperature == ChatRequest(messages=[]).temperature
    assert request.messages[0].for_template() == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "system", "content": None}])
def test_only_an_assistant_may_have_said_nothing(message: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]: Object missing required field `content`"):
        chat(messages=[message])


def test_content_parts_are_joined_in_order() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "tool", "content": parts, "tool_call_id": "c1", "name": "n"}])
    assert request.messages[0].for_template() == {"role": "tool", "content": "ab", "tool_call_id": "c1", "name": "n"}


@pytest.mark.parametrize("name", UNSERVED)
def test_an_unserved_field_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    for harmless in (*UNSERVED[name], None):
        chat(**{name: harmless})
    for asking in (2, "x", ["x"], {"type": "json_object"}):
        error = refused_chat(**{name: asking})
        assert isinstance(error, UnsupportedFieldError)
        assert (error.param, error.code) == (name, "unsupported_field")
        assert f"'{name}'" in error.message


def test_labels_are_taken_and_unknown_fields_are_not() -> None:
    chat(**dict.fromkeys(LABELS, "mine"))
    error = refused_chat(temprature=1)
    assert error.message == "unsupported field 'temprature': it is unknown here"


@pytest.mark.parametrize(
    "fields",
    [
        {"x" * 100_000: 1},
        {"stream_options": {"x" * 100_000: 1}},
        {"messages": [{"role": "x" * 100_000}]},
        {"messages": [{"role": "user", "x" * 100_000: 1}]},
    ],
)
def test_a_name_of_any_length_is_quoted_short(fields: dict[str, Any]) -> None:
    assert len(refused_chat(**fields).body()) < 1000


def test_unserved_fields_of_messages_are_refused_unless_empty() -> None:
    assert chat(messages=[{"role": "assistant", "content": "x", "tool_calls": [], "refusal": ""}])
    error = refused_chat(messages=[{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}])
    assert error.param == "messages[0].tool_calls"


def test_token_ids_stay_in_their_range() -> None:
    for bad in (-1, 2**31, 2**64, 2**70, 1.5, "1", True):
        error = refused(DetokenizeRequest, json.dumps({"tokens": [0, bad]}).encode())
        assert "tokens[1]" in error.message


@pytest.mark.parametrize("body", [{"messages": HELLO}, {"unknown": 1}])
def test_a_body_of_many_values_is_not_walked_while_it_grows(body: dict[str, Any]) -> None:
    walks: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        walks.append(phase)

    many = json.dumps({**body, "metadata": [[] for _ in range(50_000)]}).encode()
    gc.collect()
    gc.callbacks.append(note)
    try:
        with contextlib.suppress(UnsupportedFieldError):
            parse(many, ChatRequest)
    finally:
        gc.callbacks.remove(note)
    assert len(walks) <= 2  # one that was due after it, beginning and end
    assert gc.isenabled()


def test_whoever_turned_collections_off_finds_them_off() -> None:
    gc.disable()
    try:
        chat()
        assert not gc.isenabled()
    finally:
        gc.enable()
