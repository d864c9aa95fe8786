# SPDX-License-Identifier: Apache-2.0
"""A decoder some of whose layers attend to a context, as vision-language models have."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv
from jaxkv.testing.tolerances import assert_close

VOCAB, S, B = 61, 5, 2
RNG = np.random.default_rng(0)
CONTEXT = jnp.asarray(RNG.normal(size=(B, S, 24)), jnp.float32)
TOKENS = jnp.asarray(RNG.integers(VOCAB, size=(B, 7)), jnp.int32)
OWN = functools.partial(jaxkv.GroupedQueryAttention, num_heads=4, rotary=jaxkv.Rotary())
CROSS = functools.partial(jaxkv.CrossAttention, num_heads=4, context_features=24)


@functools.cache
def model(remat: bool = False) -> jaxkv.Decoder:
    layers = [OWN, CROSS]
    return jaxkv.Decoder(VOCAB, 32, 2, layers, remat=remat, rngs=nnx.Rngs(0))


@jax.jit
def called(model: jaxkv.Decoder, tokens: jax.Array, cache: Any = None, **given: Any) -> Any:
    return model(tokens, cache=cache, **given)


def test_cached_steps_equal_one_pass_and_the_context_is_kept() -> None:
    want, _ = called(model(), TOKENS, context=CONTEXT)
    cache = model().init_cache(B, 8, context_capacity=S)
    first, cache = called(model(), TOKENS[:, :4], cache, context=CONTEXT)
    parts = [first]
    for t in range(4, 7):
        step, cache = called(model(), TOKENS[:, t : t + 1], cache)
        parts.append(step)
    assert_close(jnp.concatenate(parts, axis=1), want)
    assert cache.lengths.tolist() == [7, 7] and cache.capacity == 8
    assert [index.lengths.tolist() for index in cache.indices] == [[7, 7], [S, S]]


def test_what_the_context_says_matters() -> None:
    one, _ = called(model(), TOKENS, context=CONTEXT)
    other, _ = called(model(), TOKENS, context=CONTEXT + 1)
    assert float(jnp.min(jnp.max(jnp.abs(one - other), axis=-1))) > 1e-3


def test_ragged_tokens_and_contexts_equal_each_row_alone() -> None:
    lengths, held = jnp.array([7, 3], jnp.int32), jnp.array([2, 5], jnp.int32)
    poisoned = jnp.where(jnp.arange(S)[None, :, None] < held[:, None, None], CONTEXT, jnp.nan)
    cache = model().init_cache(B, 8, context_capacity=S)
    given = dict(context=poisoned, context_lengths=held, lengths=lengths)
    cached, _ = called(model(), TOKENS, cache, **given)
    plain, _ = called(model(), TOKENS, **given)
    for row in range(B):
        n, m = int(lengths[row]), int(held[row])
        want, _ = called(model(), TOKENS[row : row + 1, :n], context=CONTEXT[row : row + 1, :m])
        assert_close(cached[row, :n], want[0])
        assert_close(plain[row, :n], want[0])


def test_verbs_move_the_tokens_and_keep_the_context() -> None:
    cache = model().init_cache(B, 8, context_capacity=S)
    _, cache = called(model(), TOKENS[:, :5], cache, context=CONTEXT)
    back = cache.rollback(2)
    assert [index.lengths.tolist() for index in back.indices] == [[3, 3], [S, S]]
    again, _ = called(model(), TOKENS[:, 3:7], back)
    assert_close(again, called(model(), TOKENS, context=CONTEXT)[0][:, 3:7])
    swapped = cache.reorder(jnp.array([1, 0], jnp.int32))
    step, _ = called(model(), TOKENS[::-1, 5:6], swapped)
    assert_close(step[::-1], called(model(), TOKENS, context=CONTEXT)[0][:, 5:6])
    # 2 KV heads x 2 x 8 channels x 4 bytes of one layer; the context is counted apart.
    assert cache.bytes_per_token == 128
    assert cache.reset().indices[1].lengths.tolist() == [0, 0]


def test_a_context_on_pages_is_whole_and_stays_so() -> None:
    # Five tokens are a page of 4 and one of the next, behind the few tokens of a shared prefix.
    cache = model().init_cache(B, 16, context_capacity=S, layout=jaxkv.Paged(4, pages=16))
    assert cache.context_capacity == 8
    _, cache = called(model(), TOKENS[:, :5], cache, context=CONTEXT)
    shared = cache.share(jnp.array([-1, 0], jnp.int32), jnp.array([0, 3], jnp.int32))
    assert [index.lengths.tolist() for index in shared.indices] == [[5, 3], [S, S]]
    step, _ = called(model(), TOKENS[:, 5:6], shared)
    prefix = jnp.concatenate([TOKENS[:1, :3], TOKENS[1:, 5:6]], axis=1)
    assert_close(step[1, 0], called(model(), prefix, context=CONTEXT[:1])[0][0, 3])
    same = cache.share(jnp.array([-1, -1], jnp.int32), jnp.array([0, 0], jnp.int32))
    for one, other in zip(
        jax.tree.leaves(same.indices), jax.tree.leaves(cache.indices), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_generate_reads_a_context_that_is_longer_than_a_page() -> None:
    want = jaxkv.generate(model(), np.asarray(TOKENS), max_new_tokens=4, context=CONTEXT)
    paged = model().init_cache(B, 16, context_capacity=S, layout=jaxkv.Paged(4))
    made = jaxkv.generate(
        model(), np.asarray(TOKENS), max_new_tokens=4, cache=paged, context=CONTEXT
    )
    np.testing.assert_array_equal(made.tokens, want.tokens)


def test_generate_reads_the_context() -> None:
    made = jaxkv.generate(model(), np.asarray(TOKENS), max_new_tokens=4, context=CONTEXT)
    tokens = TOKENS
    for step in range(4):
        logits, _ = called(model(), tokens, context=CONTEXT)
        got = made.tokens[:, step]
        chosen = jnp.take_along_axis(logits[:, -1], got[:, None], axis=1)[:, 0]
        assert jnp.all(chosen >= jnp.max(logits[:, -1], axis=-1) - 1e-5)
        tokens = jnp.concatenate([tokens, got[:, None]], axis=1)


def test_generate_wants_one_context_for_each_row() -> None:
    tokens = np.asarray(TOKENS)
    empty = model().init_cache(B, 16, context_capacity=S)
    made = jaxkv.generate(model(), tokens, max_new_tokens=2, context=CONTEXT)
    narrow = model().init_cache(B, 16, context_capacity=3)
    for given, words in (
        (dict(), "pass context_capacity=.*to generate: context="),
        (dict(cache=empty), r"no context for rows \[0, 1\]: pass context="),
        (dict(cache=made.cache, context=CONTEXT), r"rows \[0, 1\] of the cache hold one"),
        (dict(cache=narrow, context=CONTEXT), "5 tokens does not fit: rows have 3"),
        (dict(context=CONTEXT, context_lengths=jnp.array([9, 3])), r"\[9, 3\]: want 0 to 5"),
        (dict(context=[[1.0]]), "context is a list"),
    ):
        with pytest.raises(ValueError, match=words):
            jaxkv.generate(model(), tokens, max_new_tokens=2, **given)
    again = jaxkv.generate(model(), made.pending[:, None], max_new_tokens=2, cache=made.cache)
    assert again.why() == ["length"] * 2


def test_gradients_reach_the_context_with_and_without_remat() -> None:
    def loss(model: jaxkv.Decoder, context: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(model(TOKENS, context=context)[0]))

    plain, again = (jax.jit(jax.grad(loss, 1))(model(r), CONTEXT) for r in (False, True))
    assert float(jnp.min(jnp.max(jnp.abs(plain), axis=-1))) > 0
    assert_close(again, plain)


def test_layers_share_a_context() -> None:
    """A layer that reads another one's context is one with the same key and value kernels."""
    shared, apart = (
        jaxkv.Decoder(VOCAB, 32, 3, [OWN, CROSS, last], rngs=nnx.Rngs(0))
        for last in (jaxkv.Reads(1), CROSS)
    )
    state = nnx.state(apart)
    nnx.update(state, nnx.state(shared))
    nnx.update(apart, state)
    source, copy = (apart.blocks[i].attention for i in (1, 2))
    copy.key, copy.value = source.key, source.value

    def loss(model: jaxkv.Decoder, context: jax.Array) -> Any:
        given = dict(context=context, context_lengths=jnp.array([S, 3], jnp.int32))
        logits, _ = model(TOKENS, **given)
        return jnp.sum(jnp.square(logits)), logits

    learn = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    (got, gradient), logits = learn(shared, CONTEXT)
    (want, expected), whole = learn(apart, CONTEXT)
    assert_close(logits, whole)
    assert_close(gradient, expected)
    found, wanted = (dict(nnx.to_flat_state(nnx.state(x))) for x in (got, want))
    assert len(wanted) == len(found) + 2
    for path, slope in found.items():
        both = wanted[path][...]
        if path[1:4] in {(1, "attention", "key"), (1, "attention", "value")}:
            both += wanted["blocks", 2, *path[2:]][...]
        assert_close(slope[...], both, what=str(path))

    cache = shared.init_cache(B, 8, context_capacity=S)
    assert len(cache.layers) == 2
    given = dict(context=CONTEXT, context_lengths=jnp.array([S, 3], jnp.int32))
    first, cache = called(shared, TOKENS[:, :6], cache, **given)
    last, cache = called(shared, TOKENS[:, 6:], cache)
    assert_close(jnp.concatenate([first, last], axis=1), whole)
    assert cache.context_lengths.tolist() == [S, 3]


def test_what_does_not_fit_is_named() -> None:
    plain = jaxkv.Decoder(VOCAB, 32, 1, OWN, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="no layer of this model is a CrossAttention"):
        plain(TOKENS, context=CONTEXT)
    with pytest.raises(ValueError, match="context_capacity=5: no layer of this model"):
        plain.init_cache(B, 8, context_capacity=S)
    with pytest.raises(ValueError, match="pass context_capacity=, the slots"):
        model().init_cache(B, 8)
    with pytest.raises(ValueError, match=r"needs context=\[B, S, Dc\]"):
        model()(TOKENS)
    only = jaxkv.Decoder(VOCAB, 32, 1, CROSS, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="every layer holds a context"):
        only.init_cache(B, 8, context_capacity=S)
