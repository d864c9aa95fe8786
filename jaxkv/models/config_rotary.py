# SPDX-License-Identifier: Apache-2.0
"""Reads rotary settings of a Hugging Face config, old spelling and new."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxkv.core.rotary import Rotary
from jaxkv.core.rotary_scaling import DynamicNTK, Linear, Llama3, Scaling, YaRN
from jaxkv.models.config_fields import Fields, names

# Old: rope_theta and rope_scaling. New: rope_parameters, keyed by layer type where that differs.
ROTARY_FIELDS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
_SHARED_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})

Options = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RopeType:
    """Builds one rope type's scaling from its keys; `context` stands in for a missing original."""

    keys: frozenset[str]
    build: Callable[[Options, int], Scaling | None]


def _linear(options: Options, context: int) -> Scaling:
    return Linear(float(options["factor"]))


def _dynamic(options: Options, context: int) -> Scaling:
    return DynamicNTK(
        float(options["factor"]), options.get("original_max_position_embeddings") or context
    )


def _llama3(options: Options, context: int) -> Scaling:
    return Llama3(
        float(options["factor"]),
        float(options["low_freq_factor"]),
        float(options["high_freq_factor"]),
        options["original_max_position_embeddings"],
    )


def _yarn(options: Options, context: int) -> Scaling:
    return YaRN(
        float(options["factor"]),
        options.get("original_max_position_embeddings") or context,
        beta_fast=float(options.get("beta_fast") or 32.0),
        beta_slow=float(options.get("beta_slow") or 1.0),
        mscale=options.get("mscale"),
        mscale_all_dim=options.get("mscale_all_dim"),
        attention_factor=options.get("attention_factor"),
        truncate=options.get("truncate", True),
    )


ROPE_TYPES: dict[str, RopeType] = {
    "default": RopeType(frozenset(), lambda options, context: None),
    "linear": RopeType(frozenset({"factor"}), _linear),
    "dynamic": RopeType(frozenset({"factor", "original_max_position_embeddings"}), _dynamic),
    "llama3": RopeType(
        names("factor low_freq_factor high_freq_factor original_max_position_embeddings"), _llama3
    ),
    "yarn": RopeType(
        names(
            """factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
            attention_factor truncate"""
        ),
        _yarn,
    ),
}


def read_rotary(
    fields: Fields,
    *,
    theta: float = 10_000.0,
    layout: Literal["half", "interleaved"] = "half",
) -> Rotary:
    """Reads the one rotary setting of all layers.

    Args:
      fields: The config.
      theta: Base where the config has none.
      layout: Which channels form a pair in this family.

    Raises:
      ValueError: If the rope type or one of its keys is unknown, or two spellings disagree.
    """
    old, new = fields.get("rope_scaling"), fields.get("rope_parameters")
    if old is not None and new is not None:
        raise ValueError(
            f"{fields.family} config: both rope_scaling and rope_parameters are given."
        )
    return _rotary(fields, new or old or {}, "rope_theta", theta, layout)


def read_rotary_by_kind(
    fields: Fields, *, thetas: Mapping[str, float], outer: Mapping[str, str]
) -> dict[str, Rotary]:
    """Reads a setting per layer type; the old spelling scales the full layers only.

    Args:
      fields: The config.
      thetas: Layer type -> base where the config has none.
      outer: Layer type -> the old field of its base.

    Raises:
      ValueError: As `read_rotary`, and if a layer type is unknown.
    """
    old, new = fields.get("rope_scaling"), fields.get("rope_parameters")
    if old is not None and new is not None:
        raise ValueError(
            f"{fields.family} config: both rope_scaling and rope_parameters are given."
        )
    options = {"full_attention": old} if new is None else new
    strange = sorted(set(options) - set(thetas))
    if strange:
        raise ValueError(
            f"{fields.family} config: rope_parameters has {strange}, want {sorted(thetas)}."
        )
    return {
        kind: _rotary(fields, options.get(kind) or {}, outer[kind], thetas[kind], "half")
        for kind in thetas
    }


def _rotary(
    fields: Fields,
    options: Options,
    outer: str,
    theta: float,
    layout: Literal["half", "interleaved"],
) -> Rotary:
    """Builds a `Rotary` from its options and a base that may stand outside, in field `outer`."""
    if not isinstance(options, Mapping):
        raise ValueError(f"{fields.family} config: rope settings {options!r}, want a dictionary.")
    name = options.get("rope_type") or options.get("type") or "default"
    if name not in ROPE_TYPES:
        raise ValueError(
            f"{fields.family} config: unknown rope type {name!r}, known are {sorted(ROPE_TYPES)}."
        )
    rope = ROPE_TYPES[name]
    strange = sorted(set(options) - rope.keys - _SHARED_KEYS)
    if strange:
        raise ValueError(f"{fields.family} config: unknown keys {strange} of rope type {name!r}.")
    inner_theta, outer_theta = options.get("rope_theta"), fields.get(outer)
    if None not in (inner_theta, outer_theta) and inner_theta != outer_theta:
        raise ValueError(
            f"{fields.family} config: {outer} is {outer_theta} and rope_theta in the rope settings "
            f"is {inner_theta}."
        )
    try:
        scaling = rope.build(options, fields.size("max_position_embeddings"))
    except KeyError as error:
        raise ValueError(f"{fields.family} config: rope type {name!r} needs {error}.") from error
    return Rotary(
        theta=float(inner_theta or outer_theta or theta),
        fraction=float(options.get("partial_rotary_factor") or 1.0),
        layout=layout,
        scaling=scaling,
    )
