"""From a model folder to what turns messages into ids: tokenizer, encoder and renderer, as the flags want them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from server.config import Config, ConfigError
from server.metrics import Metrics
from server.render import Renderer
from server.tokenizer.choose import Choice, choose
from server.tokenizer.encode import Encoder
from server.tokenizer.errors import BackendRefusedError, TokenizerLoadError
from server.tokenizer.load import TextTokenizer, load
from server.tokenizer.reference import Recipe, reference_encoder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextTools:
    """What steps 2 and 3 of a request need."""

    tokenizer: TextTokenizer
    encoder: Encoder
    renderer: Renderer


def text_tools(config: Config, metrics: Metrics) -> TextTools:
    """Load and choose; takes seconds. Raises ConfigError naming the flag."""
    folder = Path(config.model)
    try:
        tokenizer = load(folder)
        reference = reference_encoder(folder, config.thinking_mode)
        choice = _choice(config, tokenizer)
        encoder = Encoder(
            tokenizer,
            choice.backend,
            every_control=isinstance(reference, Recipe),
            verify_rate=config.tokenizer_verify_rate,
            log_prompts=config.log_prompts,
            observe=metrics.encoded,
        )
    except TokenizerLoadError as error:
        raise ConfigError(f"--model: {error}") from error
    metrics.watch_encoder(encoder, choice.reason)
    log.info("tokenizer backend: %s (%s)", choice.backend.name, choice.reason)
    renderer = Renderer(
        tokenizer,
        config.thinking_mode,
        reference=reference,
        controls=encoder.controls if config.special_tokens_in_text == "plain" else None,
        on_fallback=metrics.encode_fallbacks.inc,
    )
    return TextTools(tokenizer, encoder, renderer)


def _choice(config: Config, tokenizer: TextTokenizer) -> Choice:
    try:
        return choose(tokenizer, config.tokenizer_backend)
    except BackendRefusedError as error:
        raise ConfigError(f"--tokenizer-backend {config.tokenizer_backend}: {error}") from error
