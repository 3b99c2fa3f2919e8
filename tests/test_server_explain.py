"""What is remembered of recent requests, for whom, and how much of it."""

from __future__ import annotations

import pytest

from server.account import Account, Call
from server.changes import Changed
from server.errors import UnknownRequestError
from server.explain import Recent
from server.metrics import Metrics
from server.reuse import Reuse

METRICS = Metrics()


def account_of(call: Call, prompt_tokens: int = 300, changed: Changed | None = None) -> Account:
    return Account(METRICS, call, prompt_tokens, changed)


def test_a_request_tells_what_it_reused_while_it_runs_and_after() -> None:
    recent, call = Recent(), Call("r1", "chat/completions", "me")
    account = account_of(call, changed=Changed(2, "user"))
    recent.add(account)
    reuse = Reuse("never_stored")
    account.submitted(reuse)
    reuse.device_tokens, reuse.host_tokens = 128, 128
    account.received(1)
    (prompt,) = recent.find("me", "r1")["prompts"]
    assert (prompt["outcome"], prompt["cached_tokens"]) == ("running", 256)
    assert (prompt["cached_device"], prompt["cached_host"], prompt["why_not_more"]) == (128, 128, "never_stored")
    assert prompt["changed_message"] == {"index": 2, "role": "user"}
    assert prompt["total_s"] is None
    account.close("stop")
    found = recent.find("me", "r1")
    assert found["endpoint"] == "chat/completions"
    assert found["prompts"][0]["outcome"] == "stop"
    assert 0 <= found["prompts"][0]["ttft_s"] <= found["prompts"][0]["total_s"]


def test_nobody_sees_another_caller_s_request() -> None:
    recent = Recent()
    recent.add(account_of(Call("r1", "completions", "me")))
    for caller, request_id in (("you", "r1"), ("me", "r2")):
        with pytest.raises(UnknownRequestError, match=f"'{request_id}'"):
            recent.find(caller, request_id)


def test_an_id_used_again_names_the_newer_request() -> None:
    recent = Recent()
    for tokens in (1, 2):
        recent.add(account_of(Call("same", "completions", "me"), tokens))
    assert [prompt["prompt_tokens"] for prompt in recent.find("me", "same")["prompts"]] == [2]


def test_all_prompts_of_a_request_are_there_and_the_oldest_requests_go() -> None:
    recent = Recent(limit=4)
    for number in range(3):
        call = Call(f"r{number}", "completions", "me")
        for _ in range(2):
            recent.add(account_of(call))
    assert [len(recent.find("me", f"r{number}")["prompts"]) for number in (1, 2)] == [2, 2]
    with pytest.raises(UnknownRequestError):
        recent.find("me", "r0")


def test_why_a_prompt_was_computed_is_counted_once_it_ends() -> None:
    metrics = Metrics()
    account = Account(metrics, Call("r", "completions", "me"), 300)
    account.submitted(Reuse("evicted", host_tokens=128))
    account.close("aborted")
    read = metrics.registry.get_sample_value
    assert read("deepinfer_hicache:not_cached_total", {"reason": "evicted"}) == 1
    assert read("deepinfer_hicache:not_cached_tokens_total", {"reason": "evicted"}) == 172
