"""From a model folder to a transformers model that calls our attention, and what its files say about it.

Reads local files only, safetensors only, and runs no code from the folder. Promises a typed error that names the
folder or file. Knows nothing about pages or requests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.native import attention
from engine.native.architecture import modelling_class
from engine.native.device import choose_dtype
from engine.native.errors import ModelFilesError, ModelRefusedError

SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

# The header of a safetensors file is JSON of this many bytes at most; a larger one is not a weight file.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, on its device and in its compute type."""

    model: PreTrainedModel
    config: PreTrainedConfig
    vocab_size: int  # of the logits
    eos_ids: tuple[int, ...]
    dtype: torch.dtype


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a model folder. Raises ModelFilesError."""
    if not folder.is_dir():
        raise ModelFilesError(f"model folder {str(folder)!r} does not exist")
    if not (folder / "config.json").is_file():
        raise ModelFilesError(f"model folder {str(folder)!r} has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise ModelFilesError(f"{str(folder / 'config.json')!r} cannot be used: {error}") from error
    assert isinstance(config, PreTrainedConfig)
    return config


def load(folder: Path, config: PreTrainedConfig, dtype: str, device: torch.device) -> LoadedModel:
    """Read the weights. Raises ModelFilesError, ModelRefusedError, LaunchError."""
    chosen = modelling_class(config)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ModelFilesError(f"model folder {str(folder)!r} has no *.safetensors file")
    compute = choose_dtype(dtype, _stored_dtype(config, weights[0]), device)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        found: Any = chosen.from_pretrained(
            folder,
            config=config,
            dtype=compute,
            attn_implementation=attention.NAME,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelFilesError(f"the weights in {str(folder)!r} cannot be loaded: {error}") from error
    model: PreTrainedModel = found[0]
    missing = sorted(found[1]["missing_keys"])
    # transformers would go on with random numbers in their place.
    if missing:
        raise ModelFilesError(f"the weights in {str(folder)!r} lack {', '.join(missing)}")
    # Not through a device map: that needs one more package, and only saves a pass through mapped host memory.
    torch.nn.Module.to(model, device)
    return LoadedModel(model.train(False), config, _vocab_size(model), _eos_ids(model), compute)


def _stored_dtype(config: PreTrainedConfig, weights: Path) -> torch.dtype:
    stored = config.get_text_config().dtype or config.dtype
    if isinstance(stored, str):
        stored = getattr(torch, stored, None)
    return stored if isinstance(stored, torch.dtype) else _first_dtype(weights)


def _first_dtype(weights: Path) -> torch.dtype:
    """The type of the first tensor: the file opens with the header's length and then the header, as JSON."""
    with weights.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > MAX_HEADER_BYTES:
            raise ModelFilesError(f"{str(weights)!r} is not a safetensors file: its header claims {size} bytes")
        header = json.loads(file.read(size))
    names = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    known = [dtype for name, dtype in SAFETENSORS_DTYPES.items() if name in names]
    if not known:
        raise ModelFilesError(f"{str(weights)!r} holds no float32, bfloat16 or float16 tensor, only {sorted(names)}")
    return known[0]


def _vocab_size(model: PreTrainedModel) -> int:
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None:
        raise ModelRefusedError(f"model_type {model.config.model_type!r} has no output head")
    return int(head.weight.shape[0])


def _eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """End-of-sequence ids of the generation config and the model config together: either may be incomplete."""
    found: set[int] = set()
    for source in (model.generation_config, model.config.get_text_config(), model.config):
        value = getattr(source, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or ())
    return tuple(sorted(found))
