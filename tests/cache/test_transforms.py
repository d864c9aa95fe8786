# SPDX-License-Identifier: Apache-2.0
"""Caches under jit, scan, while loops, vmap, checkpoint and donation."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache import LayerCache, ModelCache, create_layer, gather_layers
from tests.cache.support import CODECS, SPECS, bits, draw_tokens, fresh, normal, scoring

B, S = 2, 24
SPEC, HEADS = SPECS["gqa"]
HOW = scoring(SPEC)


def tokens(length: int, batch: int = B, seed: int = 0) -> tuple[Any, Any, Any]:
    return draw_tokens(np.random.default_rng(seed), SPEC, HEADS, batch, length)


def extend(cache: LayerCache, query: Any, key: Any, value: Any) -> tuple[jax.Array, LayerCache]:
    out, _, cache = cache.extend(query, key, value, HOW)
    return out, cache


jitted = jax.jit(extend)


def at(all_tokens: Any, t: int) -> Any:
    return [x[:, t : t + 1] for x in all_tokens]


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


@functools.cache
def one_by_one() -> tuple[np.ndarray, LayerCache]:
    """Runs four single steps from Python: what every transform is compared with."""
    cache, outs, given = fresh("gqa", B, S), [], tokens(4)
    for t in range(4):
        out, cache = jitted(cache, *at(given, t))
        outs.append(out)
    return np.concatenate(outs, axis=1), jax.tree.map(np.asarray, cache)


def test_jax_01_the_place_to_write_is_traced() -> None:
    traces = []

    @jax.jit
    def step(cache: LayerCache, query: Any, key: Any, value: Any) -> Any:
        traces.append(1)
        return extend(cache, query, key, value)

    _, cache = jitted(fresh("gqa", B, S), *tokens(5))
    given = tokens(3, seed=1)
    for t in range(3):
        _, cache = step(cache, *at(given, t))
    assert len(traces) == 1
    stored = np.asarray(cache.records.planes["key"])[:, :, 5:8]
    np.testing.assert_array_equal(stored, given[1].swapaxes(1, 2))


def test_jax_02_twenty_steps_are_one_trace() -> None:
    traces = []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache: ModelCache, query: Any, key: Any, value: Any) -> Any:
        traces.append(1)
        opened = cache.open(1)
        made = [opened.layer(i).extend(query, key, value, HOW) for i in range(2)]
        return opened.close([layer for _, _, layer in made])

    cache = gather_layers([fresh("gqa", B, S), fresh("gqa", B, S)])
    given = tokens(20)
    for t in range(20):
        if t == 7:  # what comes out of a verb has the same types as what comes out of a step
            cache = cache.rollback(1).rollback(jnp.asarray(0)).reset(jnp.zeros(B, bool))
        cache = step(cache, *at(given, t))
    assert len(traces) == 1
    assert cache.lengths.tolist() == [19, 19]
    assert not any(getattr(x, "weak_type", False) for x in jax.tree.leaves(cache))


def test_cac_05_a_later_longer_text_adds_no_trace() -> None:
    traces = []

    @jax.jit
    def step(cache: LayerCache, query: Any, key: Any, value: Any) -> Any:
        traces.append(1)
        return extend(cache, query, key, value)

    cache = create_layer(SPEC, CODECS["float32"], B, 64)
    assert cache.capacity == 64
    assert {x.shape[2] for x in cache.records.planes.values()} == {64}
    for _ in range(3):
        _, cache = step(cache, *tokens(4))
    _, cache = step(cache.reset(), *tokens(4))
    assert len(traces) == 1 and cache.capacity == 64


def test_jax_04_a_donated_cache_keeps_its_buffers() -> None:
    step = jax.jit(extend, donate_argnums=0)
    cache = fresh("gqa", B, S)
    before = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)}
    _, after = step(cache, *tokens(1))
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)} == before
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(cache.lengths)


def test_jax_06_only_the_donated_cache_is_gone() -> None:
    _, prefix = jitted(fresh("gqa", B, S), *tokens(5))
    kept = jax.tree.map(np.asarray, prefix)
    fork = jax.jit(lambda cache: cache.fork(jnp.array([0, 1, 1, 0])))
    step = jax.jit(extend, donate_argnums=0)
    first = step(fork(prefix), *tokens(1, batch=4))
    again = step(fork(prefix), *tokens(1, batch=4))
    assert_same(first, again)
    assert_same(prefix, kept)


def test_jax_07_no_buffer_stands_twice_in_a_cache() -> None:
    layers = [create_layer(SPEC, CODECS["float32"], B, S) for _ in range(3)]
    cache = gather_layers(layers)
    leaves = jax.tree.leaves(cache)
    assert len(leaves) == 3 + 3 * 2, "one index for three layers"
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)
    again = jax.jit(lambda c: c.rollback(0), donate_argnums=0)(cache)
    leaves = jax.tree.leaves(again)
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


def test_a_scan_over_steps_equals_a_loop() -> None:
    given = [jnp.asarray(x) for x in tokens(4)]

    def body(cache: LayerCache, step: Any) -> Any:
        out, cache = extend(cache, *(x[:, None] for x in step))
        return cache, out[:, 0]

    steps = [jnp.moveaxis(x, 1, 0) for x in given]
    cache, outs = jax.jit(lambda c, s: jax.lax.scan(body, c, s))(fresh("gqa", B, S), steps)
    want, after = one_by_one()
    np.testing.assert_allclose(np.moveaxis(outs, 0, 1), want, atol=1e-6)
    assert_same(cache, after)


def test_a_while_loop_stops_on_the_cache_s_own_lengths() -> None:
    given = [jnp.asarray(x) for x in tokens(4)]

    def body(carry: Any) -> Any:
        outs, cache = carry
        t = cache.lengths[0]
        out, cache = extend(cache, *(jax.lax.dynamic_slice_in_dim(x, t, 1, axis=1) for x in given))
        return jax.lax.dynamic_update_slice_in_dim(outs, out, t, axis=1), cache

    start = (jnp.zeros((B, 4, HEADS, SPEC.value_width)), fresh("gqa", B, S))
    loop = jax.jit(lambda s: jax.lax.while_loop(lambda c: c[1].lengths[0] < 4, body, s))
    outs, cache = loop(start)
    want, after = one_by_one()
    np.testing.assert_allclose(outs, want, atol=1e-6)
    assert_same(cache, after)


def test_vmap_over_caches_equals_a_loop() -> None:
    pairs = [fresh("gqa", B, S), jitted(fresh("gqa", B, S), *tokens(3, seed=5))[1]]
    together = jax.tree.map(lambda *x: jnp.stack(x), *pairs)
    given = [tokens(2, seed=s) for s in (6, 7)]
    stacked = [np.stack(x) for x in zip(*given, strict=True)]
    outs, caches = jax.jit(jax.vmap(extend))(together, *stacked)
    for i, cache in enumerate(pairs):
        out, after = jitted(cache, *given[i])
        np.testing.assert_allclose(outs[i], out, atol=1e-6)
        assert_same(jax.tree.map(lambda x, i=i: x[i], caches), after)


@pytest.mark.full
def test_vmap_of_grad_equals_a_loop() -> None:
    cache = jitted(fresh("gqa", B, S), *tokens(3, seed=5))[1]
    given = [tokens(2, seed=s) for s in (6, 7)]

    def loss(query: Any, key: Any, value: Any, cache: LayerCache) -> jax.Array:
        out, after = extend(cache, query, key, value)
        return jnp.sum(out**2) + jnp.sum(jnp.where(after.lengths[0] > 4, out[0], 0.0))

    grad = jax.grad(loss, (0, 1, 2))
    one_grad = jax.jit(grad)
    stacked = [np.stack(x) for x in zip(*given, strict=True)]
    got = jax.jit(jax.vmap(grad, in_axes=(0, 0, 0, None)))(*stacked, cache)
    for i, one in enumerate(given):
        for a, b in zip(got, one_grad(*one, cache), strict=True):
            np.testing.assert_allclose(a[i], b, atol=1e-5)


def test_jax_14_a_checkpointed_step_stores_once() -> None:
    spec, heads = SPECS["latent"]
    rng = np.random.default_rng(0)
    prefix, new = (draw_tokens(rng, spec, heads, B, n) for n in (3, 2))
    weight = normal(rng, B, 2, heads, spec.value_width)

    def step(cache: LayerCache, query: Any, key: Any, value: Any) -> Any:
        out, _, cache = cache.extend(query, key, value, scoring(spec))
        return out, cache

    def loss(inner: Any, arrays: Any, cache: LayerCache) -> Any:
        _, cache = inner(cache, *arrays[0])
        out, cache = inner(cache, *arrays[1])
        return jnp.sum(out * weight), cache

    def run(inner: Any) -> Any:
        fn = jax.value_and_grad(functools.partial(loss, inner), has_aux=True)
        return jax.jit(fn)((prefix, new), fresh("latent", B, S))

    (want, after), grads = run(step)
    (got, again), others = run(jax.checkpoint(step))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert_same(again, after)
    assert again.lengths.tolist() == [5, 5]
    for a, b in zip(jax.tree.leaves(others), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert np.asarray(grads[0][1]).any(), "the prefix's keys have a gradient"
