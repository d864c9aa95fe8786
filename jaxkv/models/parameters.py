# SPDX-License-Identifier: Apache-2.0
"""Counts a model's parameters from its config: embeddings, attention, MLPs, experts and norms."""

from __future__ import annotations

from collections.abc import Sequence

from jaxkv.models.config_fields import Fields
from jaxkv.models.geometry import LayerSpec


def gpt2(fields: Fields, layers: tuple[LayerSpec, ...]) -> int:
    """Counts LayerNorms, biases and learned positions; the head shares the embedding table."""
    width = fields.size("hidden_size")
    inner = fields.size("n_inner", 4 * width)
    attention = 4 * (width * width + width)
    mlp = 2 * width * inner + inner + width
    positions = fields.size("max_position_embeddings") * width
    blocks = len(layers) * (attention + mlp + 4 * width)
    return positions + blocks + 2 * width + _tables(fields, tied=True)


def bloom(fields: Fields, layers: tuple[LayerSpec, ...]) -> int:
    """Counts LayerNorms, one of them after the embeddings, and biases; no positions are learned."""
    width = fields.size("hidden_size")
    block = 12 * width * width + 13 * width
    return len(layers) * block + 4 * width + _tables(fields, tied=True)


def mpt(fields: Fields, layers: tuple[LayerSpec, ...]) -> int:
    """Counts norms and kernels; nothing has a bias."""
    width, ratio = fields.size("hidden_size"), fields.size("expansion_ratio", 4)
    block = (4 + 2 * ratio) * width * width + 2 * width
    return len(layers) * block + width + _tables(fields, tied=True)


def dense(
    fields: Fields,
    layers: tuple[LayerSpec, ...],
    *,
    norms: int = 2,
    head_norms: int = 0,
    query_bias: bool = False,
    tied: bool = False,
) -> int:
    """Counts a decoder with gated MLPs.

    Args:
      fields: The config.
      layers: Its layers.
      norms: Norms of model width per layer.
      head_norms: Norms of head width per layer.
      query_bias: Queries, keys and values have biases and the output has none.
      tied: Whether the head shares the embedding table where the config does not say.
    """
    width, inner = fields.size("hidden_size"), fields.size("intermediate_size")
    mlp = 3 * width * inner + (2 * inner + width if fields.flag("mlp_bias") else 0)
    block = mlp + norms * width
    attention = sum(_attention(fields, layer, head_norms, query_bias) for layer in layers)
    return attention + len(layers) * block + width + _tables(fields, tied)


def gemma3n(fields: Fields, layers: tuple[LayerSpec, ...]) -> int:
    """Counts the extra streams (AltUp), low-rank branches (LAuReL) and per-layer embeddings too.

    Layers that read another one's records have no projections and no norm that make them.
    """
    width, rank = fields.size("hidden_size"), fields.size("laurel_rank")
    streams, narrow = fields.size("altup_num_inputs"), fields.size("hidden_size_per_layer_input")
    inner = fields.get("intermediate_size")  # one for all layers, or one for each
    mlps = 3 * width * (sum(inner) if isinstance(inner, Sequence) else inner * len(layers))
    mixing = streams**2 + streams**3 + streams * width
    # Norms around attention and MLP, of the branches, the streams and the embedding; one scale.
    block = 8 * width + mixing + 2 * width * (rank + narrow)
    attention = sum(
        _attention(fields, layer, 2, read=None if layer.source is None else layers[layer.source])
        for layer in layers
    )
    per_layer = len(layers) * narrow * (fields.size("vocab_size_per_layer_input") + width) + narrow
    outer = 2 * (streams - 1) * width**2 + width + _tables(fields, tied=True)
    return attention + mlps + len(layers) * block + per_layer + outer


def mixtral(fields: Fields, layers: tuple[LayerSpec, ...]) -> int:
    """Counts experts on every layer and their router."""
    width = fields.size("hidden_size")
    experts = _experts(fields, "num_local_experts", "intermediate_size")
    attention = sum(_attention(fields, layer) for layer in layers)
    return attention + len(layers) * (experts + 2 * width) + width + _tables(fields, tied=False)


def qwen3_moe(fields: Fields, layers: tuple[LayerSpec, ...]) -> int:
    """Counts experts on the sparse layers and plain MLPs on the others."""
    width, step = fields.size("hidden_size"), fields.size("decoder_sparse_step", 1)
    experts = _experts(fields, "num_experts", "moe_intermediate_size")
    mlp = 3 * width * fields.size("intermediate_size")
    plain = set(fields.get("mlp_only_layers", ()))
    blocks = sum(
        _attention(fields, layer, head_norms=2)
        + (mlp if i in plain or (i + 1) % step else experts)
        + 2 * width
        for i, layer in enumerate(layers)
    )
    return blocks + width + _tables(fields, tied=False)


def gpt_oss(fields: Fields, layers: tuple[LayerSpec, ...]) -> int:
    """Counts experts with biases, the router's bias and one sink per query head."""
    width, inner = fields.size("hidden_size"), fields.size("intermediate_size")
    experts = fields.size("num_local_experts")
    expert = 3 * width * inner + 2 * inner + width
    block = experts * expert + experts * (width + 1) + 2 * width
    attention = sum(_attention(fields, layer) + layer.num_heads for layer in layers)
    return attention + len(layers) * block + width + _tables(fields, tied=False)


def deepseek(fields: Fields, layers: tuple[LayerSpec, ...]) -> int:
    """Counts latent projections, leading dense layers, routed and shared experts."""
    width = fields.size("hidden_size")
    first, every = fields.count("first_k_dense_replace", 0), fields.size("moe_layer_freq", 1)
    mlp = 3 * width * fields.size("intermediate_size")
    routed = fields.get("n_routed_experts")
    experts = mlp if routed is None else _deepseek_experts(fields)
    blocks = sum(
        _latent_attention(fields, layer.num_heads)
        + (experts if i >= first and i % every == 0 else mlp)
        + 2 * width
        for i, layer in enumerate(layers)
    )
    return blocks + width + _tables(fields, tied=False)


def _deepseek_experts(fields: Fields) -> int:
    width, inner = fields.size("hidden_size"), fields.size("moe_intermediate_size")
    shared = 3 * width * inner * fields.count("n_shared_experts", 0)
    return shared + _experts(fields, "n_routed_experts", "moe_intermediate_size")


def _latent_attention(fields: Fields, heads: int) -> int:
    width, latent = fields.size("hidden_size"), fields.size("kv_lora_rank")
    rotary, plain = fields.size("qk_rope_head_dim"), fields.size("qk_nope_head_dim")
    value, compressed = fields.size("v_head_dim"), fields.get("q_lora_rank")
    bias = 1 if fields.flag("attention_bias") else 0
    down = (width + bias) * (latent + rotary) + latent
    up = latent * heads * (plain + value)
    out = (heads * value + bias) * width
    query = heads * (plain + rotary)
    if compressed is None:
        return width * query + down + up + out
    return (width + bias) * compressed + compressed + compressed * query + down + up + out


def _attention(
    fields: Fields,
    layer: LayerSpec,
    head_norms: int = 0,
    query_bias: bool = False,
    read: LayerSpec | None = None,
) -> int:
    """Counts one layer; one that reads the records of layer `read` makes none."""
    width, record = fields.size("hidden_size"), (read or layer).spec
    if record is None:
        raise ValueError(f"{fields.family}: the weights of a {layer.kind} layer are not known.")
    query = layer.num_heads * record.key_width
    stored = record.kv_heads * (record.key_width + record.value_width)
    if read is not None:
        stored, head_norms = 0, head_norms // 2  # the queries' norm only
    out = layer.num_heads * record.value_width
    weights = width * (query + stored + out) + head_norms * record.key_width
    full_bias = fields.flag("attention_bias")
    return (
        weights + (query + stored if full_bias or query_bias else 0) + (width if full_bias else 0)
    )


def _experts(fields: Fields, count: str, inner: str) -> int:
    width, experts = fields.size("hidden_size"), fields.size(count)
    return experts * 3 * width * fields.size(inner) + width * experts


def _tables(fields: Fields, tied: bool) -> int:
    shared = fields.get("tie_word_embeddings", tied)
    return fields.size("vocab_size") * fields.size("hidden_size") * (1 if shared else 2)
