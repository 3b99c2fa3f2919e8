"""Short forward passes before the pool exists: what the layers store, whether flattening is right, what a step costs.

Promises that a model whose layers mix tokens by any other way than our attention is refused by name, whatever its
configuration says: two short requests, flattened, must give what transformers' own attention gives for each alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.native import attention, kernels
from engine.native.attention import Heads
from engine.native.errors import ModelRefusedError
from engine.native.kernels import Form
from engine.native.loading import LoadedModel
from engine.native.pages import LayerShape, PageLayout
from engine.native.runner import run_model
from engine.native.step_attention import QUERY_TILE

# Two requests; a layer that mixes neighbours carries the end of the first into the start of the second.
CHECKED_LENGTHS = (7, 5)

# Of the mean norm of the tokens' logits. Rounding, and an expert that it flips, stay far below in any type; a layer
# that sees the wrong tokens changes logits by about their own size.
MAX_DEVIATION = 0.3

_ID_STRIDE = 7919  # a prime, so that the checked ids differ in any vocabulary


class Probe:
    """Attends without a pool, each piece of the batch on its own, and notes what each layer would store."""

    def __init__(self, pieces: Sequence[int]) -> None:
        self._pieces = pieces
        self.shapes: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}

    def attend(self, layer: int, heads: Heads, form: Form) -> torch.Tensor:
        """Plain causal attention within each piece."""
        self.shapes[layer] = LayerShape(heads.k.shape[1], heads.k.shape[2], heads.v.shape[2])
        self.windows[layer] = form.window
        out, start = heads.empty_out(), 0
        for length in self._pieces:
            out[start : start + length] = kernels.prefill(*heads.rows(start, start + length), None, form)
            start += length
        return out


@torch.inference_mode()
def probe_layout(loaded: LoadedModel, device: torch.device) -> PageLayout:
    """The page layout of a model that was found to compute right. Raises ModelRefusedError."""
    probe = Probe(CHECKED_LENGTHS)
    name, text = loaded.config.model_type, loaded.config.get_text_config()
    ids = torch.arange(sum(CHECKED_LENGTHS), device=device) * _ID_STRIDE % loaded.vocab_size
    positions = torch.cat([torch.arange(length, device=device) for length in CHECKED_LENGTHS])
    ours = run_model(loaded.model, ids, positions, torch.arange(len(ids), device=device), probe)
    missing = sorted(set(range(text.num_hidden_layers)) - set(probe.shapes))
    if missing:
        raise ModelRefusedError(f"model_type {name!r}: layers {missing} do not go through ordinary attention")
    for layer, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind == "sliding_attention" and probe.windows[layer] is None:
            raise ModelRefusedError(f"model_type {name!r}: layer {layer} slides but does not tell its window")
    plain = _plain_logits(loaded, ids)
    deviation = float((ours - plain).norm(dim=-1).max() / plain.norm(dim=-1).mean())
    if not deviation <= MAX_DEVIATION:
        raise ModelRefusedError(
            f"model_type {name!r}: logits of two flattened requests are off by {deviation:.2f} of their norm "
            f"from each alone (at most {MAX_DEVIATION}); its layers mix tokens in a way this engine does not compute"
        )
    return PageLayout(name, loaded.dtype, tuple(probe.shapes[layer] for layer in sorted(probe.shapes)))


def _plain_logits(loaded: LoadedModel, ids: torch.Tensor) -> torch.Tensor:
    """float32 logits of each piece of `ids` alone, by transformers' own eager attention."""
    model = loaded.model
    parts = torch.split(ids, list(CHECKED_LENGTHS))
    model.set_attn_implementation("eager")
    try:
        rows = [model(input_ids=part[None], use_cache=False).logits[0] for part in parts]
    finally:
        model.set_attn_implementation(attention.NAME)
    return torch.cat(rows).float()


@torch.inference_mode()
def full_step(loaded: LoadedModel, device: torch.device, tokens: int, rows: int) -> None:
    """A forward pass of `tokens` tokens with logits for the last `rows`, to see what it takes in memory."""
    whole, rest = divmod(tokens, QUERY_TILE)
    probe = Probe([QUERY_TILE] * whole + [rest] * bool(rest))
    places = torch.arange(tokens, device=device)
    run_model(loaded.model, torch.zeros_like(places), places % QUERY_TILE, places[-rows:], probe)
