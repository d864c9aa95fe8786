# SPDX-License-Identifier: Apache-2.0
"""A training step on long rows needs memory for tiles of scores, not for all of them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxkv
from jaxkv.models.decoder import Decoder

T, N = 2048, 4


def temporary_bytes(variant: type, implementation: str | None) -> int:
    numerics = jaxkv.Numerics(implementation=implementation)
    factory = functools.partial(variant, num_heads=N, numerics=numerics)

    def loss(model: Decoder, tokens: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.logsumexp(model(tokens)[0], axis=-1))

    model = nnx.eval_shape(lambda: Decoder(32, 32, 1, factory, rngs=nnx.Rngs(0)))
    tokens = jax.ShapeDtypeStruct((1, T), jnp.int32)
    compiled = jax.jit(jax.grad(loss, allow_int=True)).lower(model, tokens).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("variant", [jaxkv.GroupedQueryAttention, jaxkv.MultiHeadLatentAttention])
def test_the_gradient_of_a_long_row_holds_no_square(variant: type) -> None:
    square = N * T * T * 4  # float32 scores of all heads: 64 MiB
    assert temporary_bytes(variant, None) < square / 4
    # So much for all scores at once: the bound above can fail.
    assert temporary_bytes(variant, "einsum") > square
