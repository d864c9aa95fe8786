# SPDX-License-Identifier: Apache-2.0
"""Lone modules that share keys and values through `SharedKV`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.attention import (
    CrossAttention,
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
)
from jaxkv.cache import Paged, Ring, SharedKV
from jaxkv.core.rotary import Rotary
from jaxkv.testing.tolerances import assert_close

B, T, D = 2, 7, 24
RNG = np.random.default_rng(0)
X, Y = (jnp.asarray(RNG.normal(size=(B, T, D)), jnp.float32) for _ in range(2))
VARIANTS = [
    MultiHeadAttention,
    MultiQueryAttention,
    GroupedQueryAttention,
    MultiHeadLatentAttention,
]


def pair(variant: Any, **options: Any) -> tuple[Any, Any]:
    def made(seed: int) -> Any:
        return variant(D, 4, head_dim=8, rotary=Rotary(), **options, rngs=nnx.Rngs(seed))

    return made(0), made(1).reading()


@jax.jit
def called(pair: tuple[Any, Any], x: Any, y: Any, cache: Any = None, **given: Any) -> Any:
    """Source and reader, each with an input of its own."""
    source, reader = pair
    first, shared = source(x, cache=SharedKV(cache), **given)
    second, shared = reader(y, cache=shared, **given)
    return (first, second), shared.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_reader_with_the_queries_of_its_source_gives_the_same(variant: Any) -> None:
    source, reader = pair(variant, window=3)
    # All that a reader has of its own is what its source has besides its records.
    own = nnx.state(source, nnx.Param)
    for name in set(own) - set(nnx.state(reader, nnx.Param)):
        del own[name]
    nnx.update(reader, own)
    (first, second), _ = called((source, reader), X, X)
    assert_close(second, first, 0)
    (_, other), _ = called((source, reader), X, Y)
    assert float(jnp.max(jnp.abs(other - first))) > 1e-2


@pytest.mark.parametrize("layout", [Ring(3), Paged(2)])
@pytest.mark.parametrize("variant", VARIANTS[2:])
def test_left_padded_chunks_through_a_cache_equal_one_call(variant: Any, layout: Any) -> None:
    modules = pair(variant, window=3)
    want, _ = called(modules, X, Y)
    cache = modules[0].init_cache(B, 8, layout=layout)
    real = jnp.asarray([[1] * 4, [0, 0, 1, 1]], jnp.int32)

    def chunk(x: jax.Array, done: tuple[int, int]) -> jax.Array:
        """The next 4 tokens of row 0, and 2 of row 1 behind rubbish."""
        rubbish = jnp.full((2, D), jnp.nan)
        return jnp.stack(
            [x[0, done[0] : done[0] + 4], jnp.concatenate([rubbish, x[1, done[1] :][:2]])]
        )

    got, cache = called(modules, chunk(X, (0, 0)), chunk(Y, (0, 0)), cache, segment_ids=real)
    rest, cache = (
        called(
            modules,
            chunk(X, (3, 2)),
            chunk(Y, (3, 2)),
            cache.rollback(jnp.asarray([1, 0], jnp.int32)),
            segment_ids=real,
        )
        if isinstance(layout, Paged)
        else (None, cache)
    )
    for part, whole in zip(got, want, strict=True):
        assert_close(part[0], whole[0, :4])
        assert_close(part[1, 2:], whole[1, :2])
    if rest is not None:
        for part, whole in zip(rest, want, strict=True):
            assert_close(part[0], whole[0, 3:])
            assert_close(part[1, 2:], whole[1, 2:4])


def test_what_does_not_fit_is_named() -> None:
    source, reader = pair(GroupedQueryAttention)
    cache = source.init_cache(B, 8)
    for given in (None, cache):
        with pytest.raises(ValueError, match="reads another module's keys and values: pass"):
            reader(X, cache=given)
    with pytest.raises(ValueError, match="this SharedKV holds no keys and values"):
        reader(X, cache=SharedKV())
    with pytest.raises(ValueError, match="no keys and values are shared yet"):
        SharedKV(cache).close()
    with pytest.raises(ValueError, match="reads another one's keys and values: that has"):
        reader.init_cache(B, 8)
    _, shared = source(X, cache=SharedKV())
    with pytest.raises(ValueError, match="holds the keys and values of another call"):
        source(X, cache=shared)
    with pytest.raises(ValueError, match=r"shared keys \(2, 7, 2, 8\) and values .* reads \(2, 6"):
        reader(X[:, :6], cache=shared)
    _, latent = pair(MultiHeadLatentAttention)
    with pytest.raises(
        ValueError, match=r"MultiHeadLatentAttention reads \(2, 7, 1, 36\) and None"
    ):
        latent(X, cache=shared)
    cross = CrossAttention(D, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="it shares no keys and values"):
        cross(X, cache=SharedKV())
    with pytest.raises(ValueError, match="CrossAttention cannot read"):
        cross.reading()
