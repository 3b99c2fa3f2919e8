"""GGUF -> model folder, on a tiny file written here, and the refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFWriter, TokenType
from safetensors.numpy import load_file

from engine.gguf_llama import GgufError, convert, half_split
from server.tokenizer.load import load

HEADS, KV_HEADS, DIM = 4, 2, 8
HIDDEN = HEADS * DIM
FFN = 64
TOKENS = ["<|end|>", "<|start|>", *"abĠ12", "ab"]
TEMPLATE = "{{ messages[0].content }}"

Tensors = dict[str, npt.NDArray[np.float32]]


def _shapes(tied: bool) -> dict[str, tuple[int, ...]]:
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (KV_HEADS * DIM, HIDDEN),
        "attn_v": (KV_HEADS * DIM, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }
    shapes = {f"blk.0.{name}": shape for name, shape in layer.items()}
    shapes |= {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    return shapes if tied else shapes | {"output": (len(TOKENS), HIDDEN)}


def _write(path: Path, *, arch: str = "llama", pre: str = "smollm", tied: bool = True, extra: str = "") -> Tensors:
    """A one-layer model with random weights; returns them by GGUF name."""
    writer = GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)
    shapes = _shapes(tied) | ({extra: (2,)} if extra else {})
    tensors = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder


def _config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_keep_their_values_under_their_new_names(gguf: Path, folder: Path, tied: bool) -> None:
    written = _write(gguf, tied=tied)
    convert(gguf, folder)
    found = load_file(folder / "model.safetensors")
    assert len(found) == len(written)
    assert _config(folder)["tie_word_embeddings"] is tied
    pairs = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
        "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
        "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
    }
    for old, new in pairs.items():
        np.testing.assert_array_equal(found[f"{new}.weight"], written[old])


def test_rotation_turns_the_same_pairs(gguf: Path, folder: Path) -> None:
    """The score of a query and a key at two positions, rotated as each format does it, is the same number."""
    written = _write(gguf)
    convert(gguf, folder)
    found = load_file(folder / "model.safetensors")
    vector = np.random.default_rng(1).standard_normal(HIDDEN, dtype=np.float32)
    old = [_rotate_neighbours((written[f"blk.0.attn_{kind}"] @ vector)[:DIM], at) for kind, at in (("q", 5), ("k", 2))]
    names = [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qk"]
    new = [_rotate_halves((found[name] @ vector)[:DIM], at) for name, at in zip(names, (5, 2), strict=True)]
    np.testing.assert_allclose(old[0] @ old[1], new[0] @ new[1], rtol=1e-5)


def _rotate_neighbours(head: npt.NDArray[np.float32], position: int) -> npt.NDArray[np.complex128]:
    return _turn(head[0::2] + 1j * head[1::2], position)


def _rotate_halves(head: npt.NDArray[np.float32], position: int) -> npt.NDArray[np.complex128]:
    return _turn(head[: DIM // 2] + 1j * head[DIM // 2 :], position)


def _turn(pairs: npt.NDArray[np.complex128], position: int) -> npt.NDArray[np.complex128]:
    turned = pairs * np.exp(1j * position * 1e5 ** (-2 * np.arange(DIM // 2) / DIM))
    return np.concatenate([turned.real, turned.imag])


def test_half_split_puts_pairs_half_a_head_apart() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert half_split(rows, heads=2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_configuration_is_the_headers(gguf: Path, folder: Path) -> None:
    _write(gguf)
    convert(gguf, folder)
    config = _config(folder)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (HEADS, KV_HEADS, DIM)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (len(TOKENS), 64)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e5
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 0)


def test_tokenizer_merges_splits_digits_and_knows_its_special_tokens(gguf: Path, folder: Path) -> None:
    _write(gguf)
    convert(gguf, folder)
    tokenizer = load(folder)
    ids = tokenizer.backend.encode("<|start|>ab 12").ids
    assert [TOKENS[token] for token in ids] == ["<|start|>", "ab", "Ġ", "1", "2"]
    assert tokenizer.decode(ids) == "ab 12"
    assert tokenizer.render_chat([{"role": "user", "content": "a"}]) == "a"


def test_file_that_is_no_gguf_is_refused(gguf: Path, folder: Path) -> None:
    gguf.write_bytes(bytes(64))
    with pytest.raises(GgufError, match=r"model\.gguf: not a GGUF file"):
        convert(gguf, folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"arch": "gemma3"}, "general.architecture is 'gemma3'"),
        ({"pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2'"),
        ({"pre": ""}, "field tokenizer.ggml.pre is missing"),
        ({"extra": "rope_freqs"}, r"tensor rope_freqs\.weight"),
        ({"extra": "blk.0.attn_sinks"}, r"tensor blk\.0\.attn_sinks\.weight"),
    ],
)
def test_what_is_not_converted_is_refused_by_name(gguf: Path, folder: Path, change: dict[str, Any], named: str) -> None:
    _write(gguf, **change)
    with pytest.raises(GgufError, match=named):
        convert(gguf, folder)
