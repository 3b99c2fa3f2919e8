"""Tiny random checkpoints of real architectures, as folders that `from_pretrained` reads.

The weights are drawn wide enough that greedy choices are rarely near ties. Every family has at least one trait
that another lacks: biases, head norms, experts, sinks, softcaps, sliding windows shorter than the tests' prompts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY: Final = 384
CONTEXT: Final = 1024
EOS: Final = 2
WINDOW: Final = 100

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_SLIDING: Final = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

# family name -> (model_type, what differs from _COMMON)
FAMILIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    "gpt_oss": ("gpt_oss", {**_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("gemma2", {**_SLIDING, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {**_SLIDING, "query_pre_attn_scalar": 16, "final_logit_softcapping": 30.0}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "granite": ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.2}),
    # Latent attention expands to keys of 24 and values of 16 elements a head.
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "head_dim": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
        },
    ),
}


def write(family: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a checkpoint of a family, its configuration changed by `changes`, and return the folder."""
    model_type, differences = FAMILIES[family]
    config = CONFIG_MAPPING[model_type](**{**_COMMON, **differences, **changes})
    return write_config(config, folder, seed=seed, dtype=dtype)


def write_config(config: Any, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint with random weights for a configuration."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        # Biases and sinks start at zero or at noise; a wrong sign or a forgotten one must show.
        if name.endswith(("bias", "sinks")):
            _fill(parameter, seed)
    model.to(dtype).save_pretrained(folder)
    return folder


def plain(folder: Path) -> PreTrainedModel:
    """The checkpoint in float32 with transformers' own eager attention: what the engine must agree with."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    assert isinstance(model, PreTrainedModel)
    return model


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Logits [len(ids), vocabulary] of one sequence, computed whole and without any cache."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    assert isinstance(logits, torch.Tensor)
    return logits


@torch.no_grad()
def _fill(parameter: torch.Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + parameter.numel())
    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
