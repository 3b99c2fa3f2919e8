"""Prompts: exactly the recorded tokens, equal where the traces' blocks are equal, the same byte for byte every time."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.agentx.errors import OptionError, VocabularyError
from bench.agentx.layout import shared_blocks
from bench.agentx.prompts import marker_of
from bench.agentx.sent import Local
from bench.agentx.session import Session, session_of
from bench.agentx.synthetic import Options, generate
from bench.agentx.traces import Trace, Turn
from bench.agentx.words import MIN_WORDS, Words
from engine.demo import demo_folder
from server.tokenizer.load import TextTokenizer, load
from tests.byte_tokenizer import write_model
from tests.tokenizer_kinds import INDEPENDENT, loaded
from tests.tokenizer_texts import deepseek_folder

ROOT = Path(__file__).resolve().parents[1]
BLOCK = 64
MARKER = "0123456789ab"

Kind = tuple[TextTokenizer, Words]


@pytest.fixture(scope="module", params=["demo", "bytes", "deepseek", "merges"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    folder = tmp_path_factory.mktemp("tokenizer")
    match request.param:
        case "demo":
            tokenizer = load(demo_folder())
        case "bytes":
            tokenizer = load(write_model(folder))
        case "deepseek":
            tokenizer = load(deepseek_folder())
        case _:
            tokenizer = loaded(INDEPENDENT["plain"](), folder)
    return tokenizer, Words(tokenizer)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Local:
    return Local(write_model(tmp_path_factory.mktemp("local")))


def _encode(tokenizer: TextTokenizer, text: str) -> list[int]:
    return list(tokenizer.backend.encode(text, add_special_tokens=False).ids)


@given(
    blocks=st.lists(st.tuples(st.text(max_size=20), st.integers(2, 3 * BLOCK)), max_size=6),
    last=st.tuples(st.text(max_size=20), st.integers(1, BLOCK)),
)
def test_blocks_side_by_side_give_back_their_tokens(
    kind: Kind, blocks: list[tuple[str, int]], last: tuple[str, int]
) -> None:
    tokenizer, words = kind
    text = "".join(words.block(key, size) for key, size in [*blocks, last])
    assert _encode(tokenizer, text) == [id_ for key, size in [*blocks, last] for id_ in words.ids(key, size)]
    assert all(len(words.ids(key, size)) == size for key, size in blocks)
    assert text == text.strip()


@given(key=st.text(max_size=20), sizes=st.tuples(st.integers(0, 200), st.integers(0, 200)))
def test_a_shorter_block_begins_a_longer_one(kind: Kind, key: str, sizes: tuple[int, int]) -> None:
    _, words = kind
    short, long = (words.ids(key, size) for size in sorted(sizes))
    assert long[: len(short)] == short
    if sizes[0] >= BLOCK:
        assert words.ids(key, BLOCK) != words.ids(key + "'", BLOCK)


def test_words_that_change_beside_others_are_left_out(tmp_path: Path) -> None:
    """Here the letters merge across borders, so that no order of many words is safe; or nothing is a word at all."""
    tokenizer = loaded(INDEPENDENT["prepends"](), tmp_path / "prepends")
    with pytest.raises(VocabularyError, match=f"fewer than {MIN_WORDS} words"):
        Words(tokenizer)


@pytest.mark.parametrize("name", ["demo", "bytes"])
def test_a_prompt_has_the_recorded_tokens_message_by_message(name: str, tmp_path: Path) -> None:
    local = Local(demo_folder() if name == "demo" else write_model(tmp_path))
    tokenizer = load(demo_folder() if name == "demo" else tmp_path)
    for trace in generate(Options(conversations=3, turns=9, scale=0.01, prefix=6000)):
        session = session_of(trace)
        for conversation in session.conversations:
            for step in conversation.steps:
                messages = local.prompts.messages(session, step, "")
                sizes = [len(_encode(tokenizer, message["content"])) for message in messages]
                assert sizes == [span.end - span.start for span in step.spans]
                assert [message["role"] for message in messages] == [span.role for span in step.spans]
                size = len(local.ids(local.prompts.messages(session, step, MARKER)))
                assert local.size(step, MARKER) == size
                whole = size + max(step.turn.tokens_out, 1)
                assert [local.fits(step, MARKER, limit) for limit in (whole - 1, whole, 9 * whole)] == [
                    False,
                    True,
                    True,
                ]
    local.close()


shared = st.lists(st.integers(0, 3), max_size=6)


@settings(max_examples=60)
@given(one=shared, other=shared, rests=st.tuples(st.integers(1, 63), st.integers(1, 63)))
def test_equal_ids_give_equal_prefixes_of_text_and_tokens(
    local: Local, one: list[int], other: list[int], rests: tuple[int, int]
) -> None:
    """Of two first turns of one trace, and of none of two traces."""

    def text(name: str, ids: list[int], rest: int) -> str:
        turn = Turn(t=len(ids), tokens_in=BLOCK * len(ids) + rest, tokens_out=1, hash_ids=ids)
        session = session_of(Trace(id=name, block_size=BLOCK, hash_id_scope="local", requests=[turn]))
        (message,) = local.prompts.messages(session, session.conversations[0].steps[0], "")
        return message["content"]

    first, second = text("a", one, rests[0]), text("a", other, rests[1])
    same = BLOCK * shared_blocks(one, other)  # a byte is a token here
    assert first[:same] == second[:same]
    if one != other and max(len(one), len(other)) * BLOCK > same:
        assert first[: same + BLOCK] != second[: same + BLOCK]
    if one == other and one:
        assert first[: same + min(rests)] == second[: same + min(rests)]
    assert text("b", one, 63)[:BLOCK] != text("a", one, 63)[:BLOCK]


def test_turns_of_a_conversation_have_the_ids_before_them_as_prefix(local: Local) -> None:
    """What was only appended to is a prefix in tokens, template and all, up to what opened the answer."""
    session = session_of(generate(Options(conversations=1, turns=9, scale=0.01, prefix=3000))[0])
    steps = session.conversations[0].steps
    appended = 0
    for before, after in pairwise(steps):
        earlier, later = (local.ids(local.prompts.messages(session, step, MARKER)) for step in (before, after))
        if after.spans[: len(before.spans)] == before.spans and before.turn.tokens_in % BLOCK == 0:
            appended += 1
            opening = len(b"\x00assistant\n")
            assert (later[: len(earlier) - opening] == earlier[:-opening]).all()
    assert appended >= 5


def test_the_marker_opens_the_prompt_and_is_new_for_each_replay(local: Local) -> None:
    session = session_of(generate(Options(conversations=1, turns=8))[0])
    for conversation in session.conversations:
        first = local.prompts.messages(session, conversation.steps[0], MARKER)[0]
        assert first["content"].startswith(f"[rid:{MARKER}]\n\n1")
    markers = {marker_of(seed, session, replay) for seed in (1, 2) for replay in range(3)}
    assert len(markers) == 6
    assert all(len(marker) == len(MARKER) for marker in markers)


PROGRAM = """
import hashlib, sys
from pathlib import Path
from tests.test_bench_agentx_prompts import fingerprint
from bench.agentx.sent import Local
print(fingerprint(Local(Path(sys.argv[1]))))
"""


def fingerprint(local: Local) -> str:
    """Of all prompts of some made traces."""
    sessions: list[Session] = [session_of(trace) for trace in generate(Options(conversations=2, turns=9, seed=4))]
    prompts = [
        local.prompts.messages(session, step, marker_of(7, session, 0))
        for session in sessions
        for conversation in session.conversations
        for step in conversation.steps
    ]
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


def test_another_process_makes_the_same_prompts_byte_for_byte(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60, env={"PYTHONHASHSEED": "99"}
    )
    assert done.stdout.strip() == fingerprint(Local(folder))


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=rf"--tokenizer {tmp_path}: .*no tokenizer\.json"):
        Local(tmp_path)
    folder = write_model(tmp_path / "plain")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(OptionError, match="no chat template"):
        Local(folder)
