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
    ScoreOptions,
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


@pytest.mark.parametrize(
    ("variant", "layout"), [(GroupedQueryAttention, Paged(2)), (MultiHeadLatentAttention, Ring(3))]
)
def test_left_padded_chunks_through_a_cache_equal_one_call(variant: Any, layout: Any) -> None:
    modules = pair(variant, window=3, score=ScoreOptions(alibi=True))
    want, _ = called(modules, X, Y)
    cache = modules[0].init_cache(B, 8, layout=layout)
    # Of each chunk of 5 tokens, row 0 holds 3 or 4 and row 1 holds 1 or 5, behind rubbish.
    done = [0, 0]
    for counts in ((3, 1), (4, 5)):
        real = np.arange(5) >= 5 - np.asarray(counts)[:, None]
        chunks = [np.full((B, 5, D), np.nan, np.float32) for _ in range(2)]
        for chunk, x in zip(chunks, (X, Y), strict=True):
            for b, n in enumerate(counts):
                chunk[b, 5 - n :] = x[b, done[b] : done[b] + n]
        segments = jnp.asarray(real, jnp.int32)
        got, cache = called(modules, *map(jnp.asarray, chunks), cache, segment_ids=segments)
        for part, whole in zip(got, want, strict=True):
            for b, n in enumerate(counts):
                assert_close(part[b, 5 - n :], whole[b, done[b] : done[b] + n])
        done = [a + b for a, b in zip(done, counts, strict=True)]
    assert cache.lengths.tolist() == done == [7, 6]


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
    with pytest.raises(ValueError, match="call's own tokens: CrossAttention reads a context"):
        CrossAttention(D, 4, rngs=nnx.Rngs(0)).reading()(X, cache=shared)


CONTEXT = jnp.asarray(RNG.normal(size=(B, 5, D)), jnp.float32)


@jax.jit
def told(pair: tuple[Any, Any], cache: Any, given: dict[str, Any]) -> Any:
    """Source and reader of a context, which the source alone is given."""
    source, reader = pair
    first, shared = source(X, cache=SharedKV(cache), **given)
    second, shared = reader(Y, cache=shared)
    return (first, second), shared.close()


def test_a_context_is_projected_stored_and_shared_once() -> None:
    source, alone = (CrossAttention(D, 4, num_kv_heads=2, rngs=nnx.Rngs(i)) for i in range(2))
    # A module with the source's key and value kernels makes the same of the context.
    alone.key, alone.value = source.key, source.value
    lengths = jnp.array([5, 2], jnp.int32)
    given = {"context": CONTEXT, "context_lengths": lengths}
    want = source(X, **given)[0], alone(Y, **given)[0]
    reader = nnx.clone(alone).reading()
    assert set(nnx.state(alone)) - set(nnx.state(reader)) == {"key", "value"}
    got, _ = told((source, reader), None, given)
    jax.tree.map(assert_close, got, want)
    empty = source.init_cache(B, 6, layout=Paged(2))
    got, cache = told((source, reader), empty, given)
    jax.tree.map(assert_close, got, want)
    assert cache.lengths.tolist() == [5, 2]
    got, cache = told((source, reader), cache, {})  # a later step only reads
    jax.tree.map(assert_close, got, want)

    _, shared = source(X, cache=SharedKV(), **given)
    noisy = CrossAttention(D, 4, num_kv_heads=2, dropout_rate=0.5, rngs=nnx.Rngs(1)).reading()
    drop = {"deterministic": False, "rngs": nnx.Rngs(dropout=0)}
    quiet, heard = noisy(Y, cache=shared)[0], noisy(Y, cache=shared, **drop)[0]
    assert float(jnp.max(jnp.abs(heard - quiet))) > 1e-2
    with pytest.raises(ValueError, match="a context: GroupedQueryAttention reads a call's own"):
        pair(GroupedQueryAttention)[1](X, cache=shared)
    with pytest.raises(ValueError, match="reads what another one made of its context"):
        reader(Y, cache=shared, **given)
    with pytest.raises(ValueError, match=r"shared keys .2, 5, 2, 6. .* reads .2, 5, 4, 6."):
        CrossAttention(D, 4, rngs=nnx.Rngs(0)).reading()(Y, cache=shared)
    with pytest.raises(ValueError, match="reads another module's keys and values: pass"):
        reader(Y, **given)
    with pytest.raises(ValueError, match="call their source with it first"):
        reader(Y, cache=SharedKV(empty))
