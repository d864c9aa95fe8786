# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 without experts: latent attention, RMS norms, gated MLP."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from flax import nnx

from jaxkv.attention import LatentOptions, MultiHeadLatentAttention
from jaxkv.core.numerics import Numerics
from jaxkv.models.decoder import Decoder
from jaxkv.models.families.kernels import (
    around_blocks,
    gated_mlp,
    into_heads,
    linear,
    norm,
    out_of_heads,
)
from jaxkv.models.families.loading import Recipe, Weight
from jaxkv.models.geometry import ModelGeometry

# The latents' norms, whatever `rms_norm_eps` says: Hugging Face's code gives them its default.
LATENT_EPSILON = 1e-6


def recipe(config: Mapping[str, Any], geometry: ModelGeometry) -> Recipe:
    """States how a DeepSeek-V3 checkpoint becomes a decoder.

    Args:
      config: Contents of `config.json`.
      geometry: What was read of it.

    Raises:
      ValueError: If a layer has experts, or a bias that only uncompressed queries would have.
    """
    layers = len(geometry.layers)
    dense = config.get("first_k_dense_replace", 3)
    if dense < layers and config.get("n_routed_experts") is not None:
        raise ValueError(
            f"deepseek_v3 config: layers {dense} to {layers - 1} have experts, which a Decoder "
            "does not compute."
        )
    if config.get("attention_bias", False) and config.get("q_lora_rank") is None:
        raise ValueError(
            "deepseek_v3 config: attention_bias without q_lora_rank leaves the queries without a "
            "bias, which MultiHeadLatentAttention does not."
        )
    tied = bool(config.get("tie_word_embeddings", False))
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
    attention = functools.partial(
        MultiHeadLatentAttention,
        num_heads=config["num_attention_heads"],
        head_dim=config["qk_nope_head_dim"],
        value_dim=config["v_head_dim"],
        latent=LatentOptions(
            latent_dim=config["kv_lora_rank"],
            rope_dim=config["qk_rope_head_dim"],
            query_latent_dim=config.get("q_lora_rank"),
            norm_epsilon=LATENT_EPSILON,
        ),
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
        numerics=numerics,
        rngs=rngs,
    )


def _block(config: Mapping[str, Any], geometry: ModelGeometry, number: int) -> Iterator[Weight]:
    D, bias = geometry.features, bool(config.get("attention_bias", False))
    N, V = config["num_attention_heads"], config["v_head_dim"]
    C, R, H = (config[k] for k in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
    source, target = f"model.layers.{number}.self_attn", f"blocks.{number}.attention"
    narrow = config.get("q_lora_rank")
    if narrow is None:
        yield from into_heads(f"{target}.query", f"{source}.q_proj", D, N, H + R, bias)
    else:
        yield from linear(f"{target}.query_down", f"{source}.q_a_proj", D, narrow, bias)
        yield from norm(f"{target}.query_latent_norm", f"{source}.q_a_layernorm", narrow)
        query_up = (f"{target}.query_up", f"{source}.q_b_proj")
        yield from into_heads(*query_up, narrow, N, H + R, bias=False)
    yield from linear(f"{target}.latent_down", f"{source}.kv_a_proj_with_mqa", D, C + R, bias)
    yield from norm(f"{target}.latent_norm", f"{source}.kv_a_layernorm", C)
    yield from _up(target, f"{source}.kv_b_proj.weight", C, N, H, V)
    yield from out_of_heads(f"{target}.out", f"{source}.o_proj", N, V, D, bias)
    inner = config["intermediate_size"]
    yield from gated_mlp(f"blocks.{number}.mlp", f"model.layers.{number}.mlp", D, inner, bias=False)


def _up(target: str, source: str, C: int, N: int, H: int, V: int) -> Iterator[Weight]:
    """Lists both parts of one tensor: `(N * (H + V), C)` becomes `[C, N, H]` and `[C, N, V]`."""
    shape = (N * (H + V), C)

    def part(begin: int, end: int, tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(N, H + V, C)[:, begin:end].transpose(2, 0, 1)

    yield Weight(f"{target}.key_up", source, shape, functools.partial(part, 0, H))
    yield Weight(f"{target}.value_up", source, shape, functools.partial(part, H, H + V))
