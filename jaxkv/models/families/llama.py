# SPDX-License-Identifier: Apache-2.0
"""Llama: grouped-query attention, RMS norms, gated MLP (Hugging Face's `LlamaForCausalLM`)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from flax import nnx

from jaxkv.attention import GroupedQueryAttention
from jaxkv.cache.spec import KVSpec
from jaxkv.core.numerics import Numerics
from jaxkv.models.decoder import Decoder
from jaxkv.models.families.kernels import around_blocks, gated_mlp, into_heads, out_of_heads
from jaxkv.models.families.loading import Recipe, Weight
from jaxkv.models.geometry import ModelGeometry


def recipe(config: Mapping[str, Any], geometry: ModelGeometry) -> Recipe:
    """States how a Llama checkpoint becomes a decoder.

    Args:
      config: Contents of `config.json`.
      geometry: What was read of it.
    """
    tied = bool(config.get("tie_word_embeddings", False))
    layers = len(geometry.layers)
    return Recipe(
        functools.partial(_decoder, config, geometry, tied),
        [
            *around_blocks(geometry.vocab, geometry.features, layers, tied),
            *(weight for i in range(layers) for weight in _block(config, geometry, i)),
        ],
        copies={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
    )


def _decoder(
    config: Mapping[str, Any],
    geometry: ModelGeometry,
    tied: bool,
    *,
    numerics: Numerics,
    rngs: nnx.Rngs,
) -> Decoder:
    heads, spec = _heads(geometry)
    attention = functools.partial(
        GroupedQueryAttention,
        num_heads=heads,
        num_kv_heads=spec.kv_heads,
        head_dim=spec.key_width,
        rotary=geometry.layers[0].rotary,
        use_bias=bool(config.get("attention_bias", False)),
        numerics=numerics,
    )
    return Decoder(
        geometry.vocab,
        geometry.features,
        len(geometry.layers),
        attention,
        mlp_features=config["intermediate_size"],
        activation=config.get("hidden_act", "silu"),
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        tied=tied,
        use_bias=bool(config.get("mlp_bias", False)),
        numerics=numerics,
        rngs=rngs,
    )


def _block(config: Mapping[str, Any], geometry: ModelGeometry, number: int) -> Iterator[Weight]:
    D, inner = geometry.features, config["intermediate_size"]
    bias, mlp_bias = (bool(config.get(name, False)) for name in ("attention_bias", "mlp_bias"))
    N, spec = _heads(geometry)
    K, H = spec.kv_heads, spec.key_width
    source, target = f"model.layers.{number}.self_attn", f"blocks.{number}.attention"
    yield from into_heads(f"{target}.query", f"{source}.q_proj", D, N, H, bias)
    yield from into_heads(f"{target}.key", f"{source}.k_proj", D, K, H, bias)
    yield from into_heads(f"{target}.value", f"{source}.v_proj", D, K, H, bias)
    yield from out_of_heads(f"{target}.out", f"{source}.o_proj", N, H, D, bias)
    yield from gated_mlp(f"blocks.{number}.mlp", f"model.layers.{number}.mlp", D, inner, mlp_bias)


def _heads(geometry: ModelGeometry) -> tuple[int, KVSpec]:
    """Takes N and the record of the first layer, which all layers share."""
    layer = geometry.layers[0]
    if layer.spec is None:
        raise ValueError(f"{geometry.name}: a {layer.kind} layer keeps no keys and values.")
    return layer.num_heads, layer.spec
