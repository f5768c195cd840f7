"""Settings of a base's generation config that change its answers."""

from collections.abc import Iterable
from typing import Any

NEVER_APPLIED = ("num_beams", "guidance_scale", "stop_strings", "penalty_alpha", "dola_layers")
"""Keys of a generation config that change the output of transformers' ``generate`` but not of drafthead's commands."""
CHANGE_TEXT = (
    *("repetition_penalty", "no_repeat_ngram_size", "min_length", "min_new_tokens", "sequence_bias"),
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("exponential_decay_length_penalty", *NEVER_APPLIED),
)
"""Keys of a generation config that change transformers' output at temperature 0."""


def changed_settings(config: Any, keys: Iterable[str]) -> list[str]:
    """Return the settings among ``keys`` that have an effect, as text: ``top_k=50`` for a number, else only the key."""
    values = {key: getattr(config, key, None) for key in keys}
    given = {key: value for key, value in values.items() if value not in (None, 0, 1, [])}
    return [f"{key}={value}" if isinstance(value, int | float) else key for key, value in given.items()]
