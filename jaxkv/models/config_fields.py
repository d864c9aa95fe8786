# SPDX-License-Identifier: Apache-2.0
"""Reads the fields of a Hugging Face config: spellings, missing ones, and ones nobody knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def names(text: str) -> frozenset[str]:
    """Splits a table of field names."""
    return frozenset(text.split())


# Fields of any model that say nothing about what a cache keeps or how many parameters there are.
IRRELEVANT = names(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures
    attention_dropout attn_implementation auto_map bad_words_ids begin_suppress_tokens
    bos_token_id cache_implementation chunk_size_feed_forward decoder_start_token_id dtype
    eos_token_id finetuning_task hidden_act id2label initializer_range is_decoder label2id
    layer_norm_eps model_type output_attentions output_hidden_states output_router_logits
    pad_token_id prefix problem_type pruned_heads quantization_config return_dict rms_norm_eps
    router_aux_loss_coef sep_token_id task_specific_params tokenizer_class torch_dtype
    torchscript transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache
    """
)

# Fields that change what a cache keeps in a way no family here has, with the values that do not.
ONLY = {
    "add_cross_attention": (None, False),
    "cross_attention_hidden_size": (None,),
    "is_encoder_decoder": (None, False),
    "use_bidirectional_attention": (None, False),
}


class Fields:
    """Holds a config under one spelling, with defaults, and complains by the field's name.

    Args:
      raw: The config's own fields.
      family: Model type, for messages.
      used: Fields that the family reads.
      ignored: Further fields that say nothing about the cache.
      spellings: Other name -> the name used here.
      defaults: Values of fields that configs leave out.

    Raises:
      ValueError: If a field is unknown, has a value that is not supported, or stands there under
        two spellings with two values.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        family: str,
        *,
        used: frozenset[str],
        ignored: frozenset[str] = frozenset(),
        spellings: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.family = family
        self._used = used
        self._values: dict[str, Any] = {}
        for name, value in raw.items():
            known = (spellings or {}).get(name, name)
            if known in used:
                self._store(known, value, name)
            elif name in ONLY:
                if value not in ONLY[name]:
                    raise ValueError(f"{family} config: {name} = {value!r} is not supported.")
            elif name not in IRRELEVANT and name not in ignored:
                raise ValueError(
                    f"{family} config: unknown field {name!r} (value {value!r}). It may change the "
                    "cache, so it is not skipped; remove it if it does not."
                )
        for name, value in (defaults or {}).items():
            if self._values.get(name) is None:
                self._values[name] = value

    def _store(self, known: str, value: Any, name: str) -> None:
        if known in self._values and self._values[known] != value:
            raise ValueError(
                f"{self.family} config: {name} = {value!r} and another spelling of {known} = "
                f"{self._values[known]!r} differ."
            )
        self._values[known] = value

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a field, or `default` where it is missing or null."""
        if name not in self._used:
            raise KeyError(f"{self.family} reads {name!r}, which its table of fields lacks")
        value = self._values.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """Returns a field that is a whole number of at least 1.

        Raises:
          ValueError: If it is missing without a default, or something else.
        """
        return self._whole(name, default, least=1)

    def count(self, name: str, default: int | None = None) -> int:
        """Returns a field that is a whole number of at least 0.

        Raises:
          ValueError: If it is missing without a default, or something else.
        """
        return self._whole(name, default, least=0)

    def flag(self, name: str) -> bool:
        """Returns a switch, off where it is missing or where the family has no such field."""
        return name in self._used and bool(self.get(name, False))

    def _whole(self, name: str, default: int | None, least: int) -> int:
        value = self.get(name, default)
        if value is None:
            raise ValueError(f"{self.family} config: field {name!r} is missing.")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"{self.family} config: {name} = {value!r}, want a whole number >= {least}."
            )
        return value
