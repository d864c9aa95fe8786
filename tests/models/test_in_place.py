# SPDX-License-Identifier: Apache-2.0
"""On CPU, the compiled decode step of a whole model writes its cache where it lies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxkv.cli.variants import VARIANTS
from jaxkv.core.numerics import Numerics
from jaxkv.core.rotary import Rotary
from jaxkv.models.decoder import Decoder
from jaxkv.models.sharing import Reads
from jaxkv.testing.hlo import assert_in_place

pytestmark = pytest.mark.as_shipped

CAPACITY, LAYERS = 4096, 2


def model(variant: str, dtype: Any, readers: int = 0) -> Decoder:
    """Makes the shapes of a model in which every weight is smaller than a plane of its cache."""
    numerics = Numerics(dtype=dtype, param_dtype=dtype)

    def attention(features: int, rngs: nnx.Rngs) -> Any:
        kind = VARIANTS[variant]
        return kind(features, 8, head_dim=64, rotary=Rotary(), numerics=numerics, rngs=rngs)

    def make() -> Decoder:
        own = 1 if readers else LAYERS
        layers = [attention] * own + [Reads(0)] * readers
        return Decoder(
            97, 256, len(layers), layers, mlp_features=512, numerics=numerics, rngs=nnx.Rngs(0)
        )

    return nnx.eval_shape(make)


def step(model: Decoder, cache: Any, tokens: jax.Array) -> Any:
    return model(tokens, cache=cache)


# Multi-head and multi-query attention are grouped-query attention with other numbers of KV heads:
# by default each meets some of both batches and dtypes.
EVERY = [
    pytest.param(
        *(variant, batch, dtype),
        marks=pytest.mark.full
        if variant in ("mha", "mqa") and (batch == 8) == (dtype == "bfloat16")
        else [],
    )
    for variant in VARIANTS
    for batch in (1, 8)
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.parametrize(("variant", "batch", "dtype"), EVERY)
def test_jax_05_every_variant_decodes_in_place(variant: str, batch: int, dtype: str) -> None:
    built = model(variant, jnp.dtype(dtype))
    cache = jax.eval_shape(lambda: built.init_cache(batch, CAPACITY))
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    compiled = jax.jit(step, donate_argnums=1).lower(built, cache, tokens).compile()
    assert_in_place(compiled, cache)


@pytest.mark.parametrize("variant", ["gqa", "mla"])
def test_what_two_layers_read_is_written_in_place_after_the_last_one(variant: str) -> None:
    built = model(variant, jnp.float32, readers=2)
    cache = jax.eval_shape(lambda: built.init_cache(1, CAPACITY))
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    compiled = jax.jit(step, donate_argnums=1).lower(built, cache, tokens).compile()
    assert len(cache.layers) == 1
    assert_in_place(compiled, cache)
