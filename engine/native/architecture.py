"""Which models this engine computes right, judged by what their configuration and modelling code declare.

The engine flattens all sequences of a step into one row, so a layer may only mix tokens through attention.
Promises a refusal that names `model_type` and the reason, before any weight is read.
"""

from __future__ import annotations

import sys
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from engine.native.errors import LaunchError, ModelRefusedError

# Layers whose only way of mixing tokens is ordinary attention over one key and value per token.
PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})

# Declare nothing that the checks below could see, yet mix neighbouring tokens of the flattened row.
MIXING_MODELS = {
    "deepseek_v4": "its compressed attention pools neighbouring tokens",
}

# Rotary frequencies that depend on the longest position in the batch: one long sequence changes all others.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def modelling_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The modelling class of a supported architecture. Raises ModelRefusedError."""
    if config.is_encoder_decoder:
        raise _refusal(config, "it is an encoder-decoder; only decoders are served")
    reason = MIXING_MODELS.get(config.model_type)
    if reason is not None:
        raise _refusal(config, reason)
    _check_layer_types(config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _refusal(config, "transformers has no causal language model for it")
    chosen: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(chosen, "_is_stateful", False):
        raise _refusal(config, "its layers carry a state from token to token")
    if not chosen._supports_attention_backend:
        raise _refusal(config, "its modelling code does not call a replaceable attention")
    causal: type[PreTrainedModel] = chosen
    return causal


def _check_layer_types(config: PreTrainedConfig) -> None:
    types = getattr(config.get_text_config(), "layer_types", None) or ()
    others = sorted(set(types) - PLAIN_LAYERS)
    if others:
        raise _refusal(config, f"layers of type {', '.join(others)} mix the tokens of different requests")


def context_length(config: PreTrainedConfig, wanted: int) -> int:
    """Tokens of one request: the model's own maximum, or `wanted` (0: not given) if that is less.

    Raises LaunchError for a value under which the rotary frequencies of a request would depend on its neighbours.
    """
    text = config.get_text_config()
    own: int = getattr(text, "max_position_embeddings", 0) or 0
    if not own and not wanted:
        raise LaunchError(f"max_model_len must be given: the config of {config.model_type!r} has no maximum")
    length = min(wanted or own, own or wanted)
    fixed = _fixed_rope_length(text, own)
    if length <= fixed:
        return length
    if wanted:
        raise LaunchError(
            f"max_model_len {wanted} is above {fixed}: beyond it the rotary frequencies of {config.model_type!r} "
            "depend on the longest request of a batch"
        )
    return fixed


def _fixed_rope_length(text: PreTrainedConfig, own: int) -> int:
    """Up to how many tokens the rotary frequencies are constant."""
    rope = getattr(text, "rope_parameters", None) or {}
    per_layer = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    lengths = [
        int(one.get("original_max_position_embeddings") or own)
        for one in per_layer
        if one.get("rope_type") in LENGTH_DEPENDENT_ROPE
    ]
    return min(lengths, default=sys.maxsize)


def _refusal(config: PreTrainedConfig, reason: str) -> ModelRefusedError:
    return ModelRefusedError(f"model_type {config.model_type!r} is not supported by the native engine: {reason}")
