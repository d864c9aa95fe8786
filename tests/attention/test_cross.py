# SPDX-License-Identifier: Apache-2.0
"""Cross-attention: the formula, a context that is projected once, and what a cache must not do."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from jaxkv.attention import CrossAttention, GroupedQueryAttention, ScoreOptions
from jaxkv.cache.codecs import Raw
from jaxkv.core.numerics import Numerics
from jaxkv.core.rotary import Rotary
from jaxkv.core.sharding import named
from jaxkv.testing.interop import pure
from jaxkv.testing.meshes import placed
from jaxkv.testing.suite import call, poisoned, quick_jit
from jaxkv.testing.tolerances import agreement, assert_close, assert_trees_close, assert_trees_equal
from tests.attention.formulas import linear, parameters, perturbed, rms
from tests.support import dense

# The context's width, 13, and its length, 7, appear in no other shape.
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 5, 16)).astype(np.float32)
CONTEXT = RNG.normal(size=(2, 7, 13)).astype(np.float32)
LENGTHS = np.array([7, 4], np.int32)


def cross(**options: Any) -> Any:
    options = {"context_features": 13, **options}
    return perturbed(CrossAttention(16, 4, **options, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def attn() -> Any:
    return cross()


def formula(attn: Any, options: dict[str, Any] | None = None) -> np.ndarray:
    """Computes cross-attention in float64: queries of X, keys and values of CONTEXT."""
    p, x, context = parameters(attn), X.astype(np.float64), CONTEXT.astype(np.float64)
    arrays = {"query": linear(p["query"], x)}
    arrays |= {name: linear(p[name], context) for name in ("key", "value")}
    if "query_norm" in p:
        arrays["query"] = rms(arrays["query"], p["query_norm"])
        arrays["key"] = rms(arrays["key"], p["key_norm"])
    if "sink_logits" in p:
        arrays["sink_logits"] = p["sink_logits"]
    return linear(p["out"], dense.attention(arrays, options).out, 2)


SCORE = ScoreOptions(scale=0.7, soft_cap=1.5, sink_logits=True, qk_norm=True)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "multi-head": ({}, {}),
    "grouped, biases, widths": (
        {"num_kv_heads": 2, "use_bias": True, "head_dim": 6, "value_dim": 3, "out_features": 9},
        {},
    ),
    "score options": ({"score": SCORE, "num_kv_heads": 1}, {"scale": 0.7, "soft_cap": 1.5}),
}


@pytest.mark.parametrize("name", list(CASES))
def test_equals_the_formula_in_float64(name: str) -> None:
    options, meaning = CASES[name]
    attn = cross(**options)
    want = formula(attn, {**meaning, "key_lengths": LENGTHS})
    y, none = call(attn, X, context=CONTEXT, context_lengths=LENGTHS)
    assert none is None
    assert_close(y, want)
    y, cache = call(attn, X, attn.init_cache(2, 9), context=CONTEXT, context_lengths=LENGTHS)
    assert_close(y, want)
    assert_close(call(attn, X, cache)[0], want, what="read only")


def test_spc_08_the_context_is_projected_once(attn: Any) -> None:
    want, _ = call(attn, X, context=CONTEXT)
    _, cache = call(attn, X[:, :1], attn.init_cache(2, 7), context=CONTEXT)
    # What reads only must not depend on the weights that made the keys and values.
    graph, params = pure(attn)
    for name in ("key", "value"):
        params[name] = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params[name])
    spoilt, traces = nnx.merge(graph, params), []

    @quick_jit
    def step(attn: Any, x: Any, cache: Any) -> Any:
        traces.append(x.shape)
        return attn(x, cache=cache)

    before = cache
    for t in range(5):
        y, cache = step(spoilt, X[:, t : t + 1], cache)
        assert_close(y, want[:, t : t + 1])
    assert traces == [(2, 1, 16)]
    assert cache.lengths.tolist() == [7, 7]
    assert_trees_equal(cache, before)
    # Nor do the weights, or the context's width of 13, stand in the compiled program.
    program = step.lower(attn, X[:, :1], cache).compile().as_text()
    assert ",13" not in program and "[13" not in program
    first = quick_jit(lambda a, x, c, context: a(x, cache=c, context=context))
    assert ",13" in first.lower(attn, X[:, :1], cache, CONTEXT).compile().as_text()


def test_a_new_context_needs_a_new_cache(attn: Any) -> None:
    y, cache = call(attn, X, attn.init_cache(2, 9), context=CONTEXT, context_lengths=LENGTHS)
    message = r"a new context, but rows \[0, 1\] of the cache hold one: reset those rows"
    with pytest.raises(ValueError, match=message):
        attn(X, cache=cache, context=CONTEXT)
    again, after = call(attn, X, cache, context=CONTEXT + 1.0)
    assert_close(again, y)
    assert after.overflowed.tolist() == [True, True]
    assert_trees_equal(after.records, cache.records)
    assert after.lengths.tolist() == [7, 4]


def test_rows_change_their_context_one_by_one(attn: Any) -> None:
    _, cache = call(attn, X, attn.init_cache(2, 9), context=CONTEXT, context_lengths=LENGTHS)
    cache = cache.reset(jnp.array([False, True]))
    other = CONTEXT[::-1]
    y, cache = call(attn, X, cache, context=other, context_lengths=np.array([0, 6], np.int32))
    assert cache.lengths.tolist() == [7, 6] and not cache.overflowed.any()
    mixed = np.stack([CONTEXT[0], other[1]])
    want, _ = call(attn, X, context=mixed, context_lengths=np.array([7, 6], np.int32))
    assert_close(y, want)


def test_a_context_longer_than_the_cache(attn: Any) -> None:
    with pytest.raises(ValueError, match=r"\[7 4\] new tokens do not fit: rows hold \[0 0\] of 6"):
        attn(X, cache=attn.init_cache(2, 6), context=CONTEXT, context_lengths=LENGTHS)
    y, cache = call(attn, X, attn.init_cache(2, 6), context=CONTEXT, context_lengths=LENGTHS)
    assert cache.overflowed.tolist() == [True, False] and cache.lengths.tolist() == [6, 4]
    kept = np.array([6, 4], np.int32)
    assert_close(y, call(attn, X, context=CONTEXT, context_lengths=kept)[0])


def test_padding_queries_give_nothing_and_an_empty_context_gives_zero(attn: Any) -> None:
    want, _ = call(attn, X, context=CONTEXT)
    segments = np.array([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]], np.int32)
    counts = np.array([5, 0], np.int32)
    for cache in (None, attn.init_cache(2, 7)):
        y, _ = call(attn, X, cache, context=CONTEXT, segment_ids=segments)
        assert_close(y, np.where(segments[..., None] != 0, want, 0.0))
        y, _ = call(attn, X, cache, context=CONTEXT, lengths=np.array([5, 2], np.int32))
        assert_close(y[1], np.where(np.arange(5)[:, None] < 2, want[1], 0.0))
        y, _ = call(attn, X, cache, context=CONTEXT, context_lengths=counts)
        assert not y[1].any()
        assert_close(y[0], call(attn, X, context=CONTEXT, context_lengths=counts)[0][0])


def test_masks_and_biases(attn: Any) -> None:
    mask, bias = RNG.random((2, 1, 5, 7)) < 0.6, RNG.normal(size=(1, 4, 1, 7)).astype(np.float32)
    arrays = {name: linear(parameters(attn)[name], CONTEXT) for name in ("key", "value")}
    arrays |= {"query": linear(parameters(attn)["query"], X), "bias": bias}
    out = dense.attention(arrays, {"mask": mask}).out
    want = linear(parameters(attn)["out"], out, 2)
    given = {"mask": mask, "bias": bias}
    assert_close(call(attn, X, context=CONTEXT, **given)[0], want)
    y, cache = call(attn, X, attn.init_cache(2, 7), context=CONTEXT, **given)
    assert_close(y, want)
    assert_close(call(attn, X, cache, **given)[0], want)
    with pytest.raises(ValueError, match=r"mask \(2, 1, 5, 7\) does not fit: .*S=9"):
        jax.eval_shape(attn, X, cache=attn.init_cache(2, 9), context=CONTEXT, mask=mask)


def test_spc_09_a_decoder_with_rotary_and_cross_attention_decodes_as_it_trains(attn: Any) -> None:
    own = GroupedQueryAttention(16, 4, rotary=Rotary(100.0), rngs=nnx.Rngs(1))
    x = np.random.default_rng(1).normal(size=(2, 10, 16)).astype(np.float32)

    def layer(x: Any, caches: Any, **given: Any) -> Any:
        y, mine = own(x, cache=caches[0])
        x = x + y
        y, theirs = attn(x, cache=caches[1], **given)
        return x + y, (mine, theirs)

    run = quick_jit(layer)
    want, _ = run(x, (None, None), context=CONTEXT)
    y, caches = run(x[:, :1], (own.init_cache(2, 10), attn.init_cache(2, 7)), context=CONTEXT)
    outs = [y]
    for t in range(1, 10):
        y, caches = run(x[:, t : t + 1], caches)
        outs.append(y)
    assert_close(np.concatenate(outs, axis=1), want)


def test_gradients_reach_the_context_through_the_cache(attn: Any) -> None:
    def cached(attn: Any, x: Any, context: Any, cache: Any) -> Any:
        first, cache = attn(x[:, :2], cache=cache, context=context, context_lengths=LENGTHS)
        last, _ = attn(x[:, 2:], cache=cache)
        return jnp.sum(jnp.square(jnp.concatenate([first, last], axis=1)))

    def uncached(attn: Any, x: Any, context: Any) -> Any:
        y, _ = attn(x, context=context, context_lengths=LENGTHS)
        return jnp.sum(jnp.square(y))

    want = quick_jit(jax.grad(uncached, argnums=(0, 1, 2)))(attn, X, CONTEXT)
    gradient = quick_jit(jax.grad(cached, argnums=(0, 1, 2)))
    for cache in (attn.init_cache(2, 9), poisoned(attn.init_cache(2, 9))):
        assert_trees_close(gradient(attn, X, CONTEXT, cache), want)
    assert not np.asarray(want[2])[1, 4:].any()


def test_dropout_and_formats(attn: Any) -> None:
    dropping = cross(dropout_rate=0.5)
    keys = jax.random.split(jax.random.key(0), 2000)
    x, context = X[:1, :2], CONTEXT[:1]

    def run(key: Any) -> Any:
        rngs = nnx.Rngs(dropout=key)
        return dropping(x, context=context, deterministic=False, rngs=rngs)[0]

    ys = np.asarray(quick_jit(jax.vmap(run))(keys))
    want, _ = call(attn, x, context=context)
    assert np.abs(ys[0] - ys[1]).max() > 1e-2
    assert_close(ys.mean(axis=0), want, 0.05)
    narrow = cross(numerics=Numerics(dtype=jnp.bfloat16))
    cache = narrow.init_cache(2, 7, codec=Raw(jnp.float32))
    y, cache = call(narrow, X, cache, context=CONTEXT)
    assert y.dtype == jnp.bfloat16
    assert_close(y, call(attn, X, context=CONTEXT)[0], agreement("bfloat16"))


def test_a_donated_step_leaves_the_cache_where_it_is(attn: Any) -> None:
    _, cache = call(attn, X, attn.init_cache(2, 7), context=CONTEXT)
    step = jax.jit(lambda attn, x, cache: attn(x, cache=cache), donate_argnums=2)
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, cache = step(attn, X[:, :1], cache)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)] == places


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
def test_a_mesh_changes_nothing(kind: AxisType) -> None:
    attn = cross(num_kv_heads=2)
    want, _ = call(attn, X, context=CONTEXT, context_lengths=LENGTHS)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        cache = attn.init_cache(2, 9)
        assert cache.replicas == 2
        cache = jax.device_put(cache, cache.sharding(mesh))
        x, context = (
            jax.device_put(a, named(mesh, ("batch", None, None), a.shape)) for a in (X, CONTEXT)
        )
        sharded, lengths = placed(attn, mesh), jnp.asarray(LENGTHS)
        y, _ = call(sharded, x, context=context, context_lengths=lengths)
        assert_close(y, want)
        y, cache = call(sharded, x, cache, context=context, context_lengths=lengths)
        assert_close(y, want)
        assert_close(call(sharded, x, cache)[0], want)


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, r"cross-attention needs context=\[B, S, Dc\], or a cache that holds one"),
        ({"context": CONTEXT[:, :, :8]}, r"context \(2, 7, 8\): want \[2, S, 13\]"),
        ({"context": CONTEXT[:1]}, r"context \(1, 7, 13\): want \[2, S, 13\]"),
        ({"context_lengths": LENGTHS}, "context_lengths without a context: pass both"),
        (
            {"context": CONTEXT, "context_lengths": LENGTHS[:1]},
            r"context_lengths int32\(1,\): want",
        ),
        (
            {"context": CONTEXT, "context_lengths": LENGTHS + 1},
            r"context_lengths \[8, 5\]: want 0 to 7",
        ),
        (
            {"context": CONTEXT, "positions": np.zeros((2, 5), np.int32)},
            "positions: cross-attention has",
        ),
        ({"context": CONTEXT, "mask": np.ones((5, 6), bool)}, r"mask \(5, 6\) does not fit: .*S=7"),
    ],
)
def test_bad_calls(attn: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda x: attn(x, **given), X)


def test_a_cache_without_a_context_says_so(attn: Any) -> None:
    with pytest.raises(ValueError, match=r"the cache holds no context yet: pass context"):
        attn(X, cache=attn.init_cache(2, 7))
    with pytest.raises(ValueError, match="open step"):
        attn(X, cache=attn.init_cache(2, 7).open(3), context=CONTEXT)
