"""The encode bench: its conversations grow as it says, its lateness is that of bursts, and it runs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench.encode import main
from bench.encoding.conversation import Conversation
from bench.encoding.lag import _late
from server.body import parse
from server.fields import ChatRequest
from server.tokenizer.load import load
from tests.tokenizer_texts import deepseek_folder


def test_a_turn_is_about_two_thousand_tokens_and_appends() -> None:
    backend = load(deepseek_folder()).backend
    conversation = Conversation(seed=3)
    conversation.grow(30_000)
    before = list(conversation.messages)
    conversation.turn()
    assert conversation.messages[: len(before)] == before
    added = "".join(message["content"] for message in conversation.messages[len(before) :])
    assert 1500 < len(backend.encode(added).ids) < 3000
    assert [message.text for message in parse(conversation.body(), ChatRequest).messages] == [
        message["content"] for message in conversation.messages
    ]


def test_conversations_of_other_seeds_share_no_message() -> None:
    one, other = Conversation(seed=1), Conversation(seed=2)
    for conversation in (one, other):
        conversation.grow(50_000)
    shared = {message["content"] for message in one.messages} & {message["content"] for message in other.messages}
    assert shared == set()


def test_only_what_is_late_in_a_burst_counts() -> None:
    # (time of waking, seconds late, busy): before, across the start, inside, across the end, after.
    notes = np.array([(0.9, 0.5, 0.5), (1.2, 0.25, 0.1), (1.5, 0.001, 0), (2.1, 0.15, 0.1), (2.5, 0.4, 0.4)])
    row = _late(notes, [(1.0, 2.0)])
    assert (row["lag_max_ms"], row["lag_p50_ms"], row["busy_max_ms"], row["burst_s"]) == (250.0, 150.0, 100.0, 1.0)


def test_the_bench_ends_in_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--parts", "detok"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["backend"] for row in line["rows"]] == ["two decodes", "two bare decodes", "ours", "events"]


@pytest.mark.soak
def test_every_result_of_the_bench_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--parts", "encode", "lag", "--sizes", "3000", "--rounds", "1"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {row["part"] for row in rows} == {"encode", "lag"}
