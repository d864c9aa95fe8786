# SPDX-License-Identifier: Apache-2.0
"""The read loop's gradient where every real score is very low and the last block is half empty."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import KVSpec, Raw, Scoring, create_layer
from jaxkv.core.visibility import Visibility
from jaxkv.ops.api import attention

SPEC, LIVE, CAPACITY = KVSpec(1, 4, 4), 70, 128  # blocks hold at least 64 slots


def test_num_05_empty_slots_of_the_last_block_do_not_blow_up_the_gradient() -> None:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32) * 0.1

    # q . k is near -100 for every real key, and exp(0 - lse) would be inf.
    query = draw(1, 1, 1, 4) + 5.0
    key, value = draw(1, LIVE, 1, 4) - 5.0, draw(1, LIVE, 1, 4)
    rule = Visibility()

    def cached(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        cache = create_layer(SPEC, Raw(jnp.float32), 1, CAPACITY)
        poison = {n: jnp.full_like(x, jnp.nan) for n, x in cache.records.planes.items()}
        records = dataclasses.replace(cache.records, planes=poison)
        cache = dataclasses.replace(cache, records=records).open(LIVE).write(key, value).close()
        order = jnp.full((1, 1), LIVE, jnp.int32)
        out, lse = cache.attend(query, Scoring(rule, 1.0), q_order=order)
        return jnp.sum(out * jnp.arange(1.0, 5.0).reshape(1, 1, 1, 4)) + jnp.sum(lse)

    def dense(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        out, lse = attention(
            query, key, value, scale=1.0, implementation="reference", return_lse=True
        )
        return jnp.sum(out * jnp.arange(1.0, 5.0).reshape(1, 1, 1, 4)) + jnp.sum(lse)

    got = jax.jit(jax.grad(cached, (0, 1, 2)))(query, key, value)
    want = jax.jit(jax.grad(dense, (0, 1, 2)))(query, key, value)
    assert float(dense(query, key, 0 * value)) < -88.7  # the lse alone
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
