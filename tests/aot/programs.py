# SPDX-License-Identifier: Apache-2.0
"""Models at the widths of Llama-3-8B and DeepSeek-V3, two layers deep, as shapes alone."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxkv.attention import (
    GroupedQueryAttention,
    LatentOptions,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
)
from jaxkv.cache.model_cache import ModelCache
from jaxkv.cache.records import physical_bytes
from jaxkv.core.numerics import Numerics
from jaxkv.core.rotary import Rotary
from jaxkv.models.decoder import Decoder

ROWS, LENGTH, LAYERS = 8, 2048, 2

# Llama-3-8B, Llama-3.2-1B (whose heads are half a tile wide) and DeepSeek-V3, of whose layers the
# first ones, which have a dense MLP. MHA and MQA are Llama-3-8B with other numbers of KV heads.
LLAMA = dict(vocab=128_256, features=4096, mlp_features=14_336)
SMALL_LLAMA = dict(vocab=128_256, features=2048, mlp_features=8192)
DEEPSEEK = dict(vocab=129_280, features=7168, mlp_features=18_432)
HEADS = dict(num_heads=32, head_dim=128, rotary=Rotary(5e5))
LATENT = LatentOptions(latent_dim=512, rope_dim=64, query_latent_dim=1536)
VARIANTS: dict[str, tuple[dict[str, int], Any]] = {
    "mha": (LLAMA, functools.partial(MultiHeadAttention, **HEADS)),
    "gqa": (LLAMA, functools.partial(GroupedQueryAttention, num_kv_heads=8, **HEADS)),
    "mqa": (LLAMA, functools.partial(MultiQueryAttention, **HEADS)),
    "gqa-64": (
        SMALL_LLAMA,
        functools.partial(GroupedQueryAttention, num_kv_heads=8, **HEADS | {"head_dim": 64}),
    ),
    "mla": (
        DEEPSEEK,
        functools.partial(
            MultiHeadLatentAttention,
            num_heads=128,
            head_dim=128,
            latent=LATENT,
            rotary=Rotary(1e4, layout="interleaved"),
        ),
    ),
}


def decoder(
    variant: str, *, param_dtype: DTypeLike, remat: bool = False, **changed: int
) -> Decoder:
    """Builds a model that computes in bfloat16, without allocating it; `changed` are sizes."""
    published, attention = VARIANTS[variant]
    sizes = {"num_layers": LAYERS} | published | changed
    numerics = Numerics(dtype=jnp.bfloat16, param_dtype=param_dtype)

    def make() -> Decoder:
        return Decoder(
            attention=functools.partial(attention, numerics=numerics),
            tied=False,
            remat=remat,
            numerics=numerics,
            rngs=nnx.Rngs(0),
            **sizes,
        )

    return nnx.eval_shape(make)


def empty_cache(model: Decoder, *, lanes: int = 128) -> ModelCache:
    """Shapes of the cache of `ROWS` rows; lanes as they are on a TPU."""
    return jax.eval_shape(lambda: model.init_cache(ROWS, LENGTH, lanes=lanes))


def tokens(rows: int, length: int) -> jax.ShapeDtypeStruct:
    """Shapes of `rows` rows of tokens."""
    return jax.ShapeDtypeStruct((rows, length), jnp.int32)


def device_bytes(tree: Any) -> int:
    """Counts what arrays take in a TPU's memory, with the padding of their tiles."""
    return sum(physical_bytes(x, tiled=True) for x in jax.tree.leaves(tree))


def smallest_plane(tree: Any) -> int:
    """Counts the elements of the smallest stored array."""
    return min(math.prod(x.shape) for x in jax.tree.leaves(tree) if len(x.shape) > 2)
