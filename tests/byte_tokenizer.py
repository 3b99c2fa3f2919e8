"""A tiny model folder without weights: byte-level tokenizer, ChatML template, configuration.

An id below 256 is that byte, so a test can read ids as text and the other way round. The fake engine serves it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from server.tokenizer.pieces import ALPHABET

BOS: Final = 256
EOS: Final = 257
IM_START: Final = 258
IM_END: Final = 259
SPECIAL: Final = {"<|bos|>": BOS, "<|eos|>": EOS, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
VOCAB_SIZE: Final = 260
MAX_MODEL_LEN: Final = 8192
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('unknown role ' ~ message.role) }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """256 byte tokens, no merges, four special tokens; `add_special_tokens` puts <|bos|> in front."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(ALPHABET), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    return tokenizer


def write_model(folder: Path) -> Path:
    """Fill `folder` (made if needed) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|eos|>",
            "model_max_length": MAX_MODEL_LEN,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": MAX_MODEL_LEN,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
        },
    )
    return folder


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
