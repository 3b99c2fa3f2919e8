"""A Llama-family GGUF file -> a model folder for `transformers`: fp32 safetensors, configuration, tokenizer, template.

Promises the same numbers and the same token ids as the checkpoint the file was made from, as far as quantization left
them. Reads the header once and imports no torch. Knows nothing about where the file came from.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import PreTokenizer

# GGUF tensor name -> transformers' name, for the tensors outside the layers.
GLOBAL_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_TENSOR: Final = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
CONTROL_TOKEN: Final = 3  # llama.cpp's token type of special tokens


class GgufError(ValueError):
    """The file is not a Llama-family GGUF that this module converts; the message names the file and the field."""


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` into the existing `folder`. Raises GgufError, OSError."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
    except ValueError as error:
        raise GgufError(f"{gguf}: not a GGUF file: {error}") from error
    fields = _Fields(gguf, reader)
    fields.expect("general.architecture", "llama")
    fields.expect("tokenizer.ggml.model", "gpt2")
    config = model_config(fields)
    _write_tensors(reader, config, folder / "model.safetensors")
    _write_json(folder / "config.json", config)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", special)
    _write_tokenizer(fields, folder)


class _Fields:
    """The header's key-value pairs, decoded on first use (the token and merge lists take most of the time)."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self._path = path
        self._reader = reader

    def __getitem__(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise GgufError(f"{self._path}: field {key} is missing")
        return field.contents()

    def expect(self, key: str, value: str) -> None:
        found = self[key]
        if found != value:
            raise GgufError(f"{self._path}: {key} is {found!r}, only {value!r} is converted")


def model_config(fields: _Fields) -> dict[str, Any]:
    """config.json. `rope_theta` stands both at the top and in `rope_parameters`: readers differ in where they look."""
    theta = fields["llama.rope.freq_base"]
    heads = fields["llama.attention.head_count"]
    hidden = fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def _write_tensors(reader: GGUFReader, config: dict[str, Any], path: Path) -> None:
    from gguf import dequantize
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        name, heads = _target(tensor.name, config)
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        tensors[name] = half_split(values, heads) if heads else values
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, mostly
        raise OSError(f"{path}: {error}") from error
    path.chmod(0o644)  # written for its owner alone, while a cache may serve several users


def _target(name: str, config: dict[str, Any]) -> tuple[str, int]:
    """Transformers' name of a tensor, and its number of heads if its rows are in GGUF's rotary order."""
    layer = LAYER_TENSOR.fullmatch(name)
    if layer and layer[2] in LAYER_NAMES:
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(layer[2], 0)
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.weight", heads
    stem = name.removesuffix(".weight")
    if stem not in GLOBAL_NAMES:
        raise GgufError(f"tensor {name} has no counterpart in LlamaForCausalLM")
    return f"{GLOBAL_NAMES[stem]}.weight", 0


def half_split(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Projection rows `[heads * dim, hidden]` from GGUF's order to transformers'.

    GGUF keeps the two members of a rotated pair side by side (0, 1, 2, 3, ...); transformers keeps them half a head
    apart (0, 2, ..., 1, 3, ...).
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _write_tokenizer(fields: _Fields, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    left_right = (merge.split(" ") for merge in fields["tokenizer.ggml.merges"])
    bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[(a, b) for a, b in left_right])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _pre_tokenizer(fields)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    control = (token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    _write_json(
        folder / "tokenizer_config.json",
        {key: tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for key, name in names.items()}
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
        },
    )
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")


def _pre_tokenizer(fields: _Fields) -> PreTokenizer:
    """A GGUF only names its pre-tokenizer. `smollm` splits digits first: without it "  12" and "½" get other ids."""
    from tokenizers import pre_tokenizers

    fields.expect("tokenizer.ggml.pre", "smollm")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
