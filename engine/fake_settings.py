"""What the fake engine is told and tells: pace and kind from the environment, vocabulary from the model folder; facts.

Promises that a bad value is named with its variable or file. Knows nothing about how the engine works.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from engine.fake_rows import BLOCK_TOKENS
from engine.fake_states import FIRST_STATE, KEEP_TOKENS, RING, STAGED, STATE_BYTES, STATE_WINDOW
from ipc.messages import Facts, Launch

ENTRY_BYTES: Final = 8
DEFAULT_MAX_MODEL_LEN: Final = 8192


@dataclass(frozen=True, slots=True)
class FakePace:
    """How slow the fake pretends to be; zero is as fast as it can."""

    step_s: float = 0.0
    prefill_token_s: float = 0.0

    @classmethod
    def from_environment(cls) -> FakePace:
        """Read DEEPINFER_FAKE_STEP_MS and DEEPINFER_FAKE_PREFILL_TOKENS_PER_S. Raises ValueError naming them."""
        step_ms = _environment_number("DEEPINFER_FAKE_STEP_MS")
        prefill = _environment_number("DEEPINFER_FAKE_PREFILL_TOKENS_PER_S")
        return cls(step_ms / 1000, 1 / prefill if prefill else 0.0)


def states_wanted() -> bool:
    """Whether DEEPINFER_FAKE_STATES says that the fake keeps a state beside its pages. Raises ValueError."""
    text = os.environ.get("DEEPINFER_FAKE_STATES", "0")
    if text not in ("0", "1"):
        raise ValueError(f"DEEPINFER_FAKE_STATES must be 0 or 1, got {text!r}")
    return text == "1"


class FakeModel(msgspec.Struct, frozen=True):
    """What the fake needs of the `config.json` of the model it stands in for."""

    vocab_size: Annotated[int, msgspec.Meta(ge=2)]
    eos_token_id: int | list[int] | None = None
    max_position_embeddings: Annotated[int, msgspec.Meta(ge=2)] = DEFAULT_MAX_MODEL_LEN

    @classmethod
    def read(cls, folder: Path) -> FakeModel:
        """Raises OSError, and ValueError naming the file."""
        file = folder / "config.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{file}: {error}") from error

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a sequence, however they are written."""
        eos = self.eos_token_id
        return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)


def facts_of(launch: Launch, model: FakeModel, blocks: int, has_states: bool) -> Facts:
    """What the fake says of itself, with a pool of so many blocks."""
    facts = Facts(
        engine="fake",
        model_type="fake",
        dtype="uint64",
        device="cpu",
        vocab_size=model.vocab_size,
        eos_ids=model.eos_ids,
        max_model_len=launch.max_model_len or model.max_position_embeddings,
        max_num_seqs=launch.max_num_seqs,
        block_size=BLOCK_TOKENS,
        num_blocks=blocks,
        page_bytes=BLOCK_TOKENS * ENTRY_BYTES,
        layout_digest="fake-1",
    )
    if not has_states:
        return facts
    return msgspec.structs.replace(
        facts,
        state_bytes=STATE_BYTES,
        num_states=launch.max_num_seqs * RING + STAGED,
        state_window=STATE_WINDOW,
        first_state=FIRST_STATE,
        keep_tokens=KEEP_TOKENS,
        layout_digest="fake-states-1",
    )


def _environment_number(name: str) -> float:
    text = os.environ.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}") from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be finite and not negative, got {text!r}")
    return value
