"""A model folder without weights for the fake engine: a vocabulary of words, so that its random ids read as text.

Nearly every token is a whole word, as in a real vocabulary: a detokenizer is measured on its common case, not on
random bytes. Fixed seed.
"""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WORDS: Final = 32_000
SEED: Final = 7
EOS: Final = "<|eos|>"
SPACE: Final = "\u0120"  # how byte-level vocabularies spell a leading space
MAX_MODEL_LEN: Final = 8192
CHAT_TEMPLATE: Final = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def vocabulary() -> dict[str, int]:
    """Every byte, then words of two to nine letters with a space in front."""
    rng = random.Random(SEED)
    words: dict[str, None] = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(words) < WORDS:
        words[SPACE + "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9)))] = None
    return {word: index for index, word in enumerate(words)}


def write_model(folder: Path) -> Path:
    """Fill `folder` (made if needed) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "model_max_length": MAX_MODEL_LEN,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write(
        folder / "config.json",
        {
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": MAX_MODEL_LEN,
            "eos_token_id": tokenizer.token_to_id(EOS),
        },
    )
    return folder


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
