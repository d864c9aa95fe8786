# SPDX-License-Identifier: Apache-2.0
"""Exact facts of compiled steps: what is aliased, what is copied, how much is needed besides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxkv.cache import (
    H2O,
    TOVA,
    Codec,
    Contiguous,
    Evicting,
    Float8,
    Int4,
    Int8,
    Kivi,
    KVSpec,
    LayerCache,
    Layout,
    ModelCache,
    Paged,
    Policy,
    Raw,
    Ring,
    SnapKV,
    create_layer,
    gather_layers,
)
from jaxkv.testing.hlo import assert_in_place, cache_sized_ops
from tests.cache.support import scoring

pytestmark = pytest.mark.as_shipped

S = 2048
# (record, query heads) at real sizes: nothing is run, and compiling does not depend on sizes.
REAL = {
    "gqa": (KVSpec(8, 128, 128), 32),
    "latent": (KVSpec(1, 576, 512, value_offset=0), 16),
}


def shape(*sizes: int, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def new_tokens(kind: str, batch: int, length: int, dtype: Any) -> tuple[Any, Any, Any]:
    spec, heads = REAL[kind]
    query = shape(batch, length, heads, spec.query_width, dtype=dtype)
    key = shape(batch, length, spec.kv_heads, spec.query_width, dtype=dtype)
    if spec.value_offset is not None:
        return query, key, None
    return query, key, shape(batch, length, spec.kv_heads, spec.value_width, dtype=dtype)


def abstract(kind: str, batch: int, dtype: Any, layers: int = 0) -> Any:
    """Gives the shapes of a layer's cache, or with `layers` of a model's."""

    def make() -> Any:
        made = [create_layer(REAL[kind][0], Raw(dtype), batch, S) for _ in range(max(layers, 1))]
        return gather_layers(made) if layers else made[0]

    return jax.eval_shape(make)


def layer_step(kind: str) -> Callable[..., Any]:
    how = scoring(REAL[kind][0])

    def step(cache: LayerCache, query: Any, key: Any, value: Any) -> Any:
        out, _, cache = cache.extend(query, key, value, how)
        return out, cache

    return step


def model_step(kind: str) -> Callable[..., Any]:
    """Builds layers that follow each other, as in a model: queries depend on the layer before."""
    how = scoring(REAL[kind][0])

    def step(cache: ModelCache, query: Any, key: Any, value: Any) -> Any:
        opened, layers = cache.open(query.shape[1]), []
        for number in range(len(cache.layers)):
            out, _, layer = opened.layer(number).extend(query, key, value, how)
            query = query + jnp.mean(out, axis=-1, keepdims=True).astype(query.dtype)
            layers.append(layer)
        return query, opened.close(layers)

    return step


def compiled(step: Callable[..., Any], cache: Any, tokens: Any) -> Any:
    return jax.jit(step, donate_argnums=0).lower(cache, *tokens).compile()


def activations(kind: str, batch: int, length: int) -> int:
    """Counts float32 queries and outputs: a handful of them live beside each other."""
    spec, heads = REAL[kind]
    return 4 * batch * length * heads * (spec.query_width + spec.value_width)


DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
EVERY = [(kind, batch, dtype) for kind in REAL for batch in (1, 8) for dtype in DTYPES]
USUAL = [("gqa", 1, "float32"), ("latent", 8, "bfloat16")]
USUAL_FIRST = [c if c in USUAL else pytest.param(*c, marks=pytest.mark.full) for c in EVERY]


@pytest.mark.parametrize(("kind", "batch", "dtype"), EVERY)
def test_jax_05_a_decode_step_is_in_place(kind: str, batch: int, dtype: str) -> None:
    cache = abstract(kind, batch, DTYPES[dtype])
    step = compiled(layer_step(kind), cache, new_tokens(kind, batch, 1, DTYPES[dtype]))
    assert_in_place(step, cache)


@pytest.mark.parametrize(("kind", "batch", "dtype"), USUAL_FIRST)
def test_jax_05_a_decode_step_of_a_model_is_in_place(kind: str, batch: int, dtype: str) -> None:
    cache = abstract(kind, batch, DTYPES[dtype], layers=3)
    step = compiled(model_step(kind), cache, new_tokens(kind, batch, 1, DTYPES[dtype]))
    assert_in_place(step, cache)


BF16 = Raw(jnp.bfloat16)
# (record, layout, codec, batch): every layout with exact and with coded records, and every codec.
PAIRS: list[tuple[str, Layout, Codec, int]] = [
    ("gqa", Ring(S, pinned=4), BF16, 8),
    ("gqa", Ring(S, pinned=4), Int4(), 8),
    ("latent", Ring(S, pinned=4), Int8(), 8),
    ("gqa", Paged(16), Raw(jnp.float32), 1),
    ("gqa", Paged(64), Int4(), 8),
    ("gqa", Paged(64), Kivi(4, dtype=jnp.bfloat16), 8),
    ("latent", Paged(64), BF16, 8),
    ("latent", Paged(16), Int8(), 1),
    ("gqa", Contiguous(), Raw(jnp.float16), 8),
    ("gqa", Contiguous(), Int4(32), 1),
]
MORE_PAIRS: list[tuple[str, Layout, Codec, int]] = [
    ("gqa", Ring(S, pinned=4), Int8(), 1),
    ("gqa", Ring(S, pinned=4), Float8(), 1),
    ("latent", Ring(S, pinned=4), BF16, 1),
    ("gqa", Paged(16), BF16, 8),
    ("gqa", Paged(64), Float8(), 1),
    ("gqa", Paged(256), BF16, 1),
]


@pytest.mark.parametrize(
    ("kind", "layout", "codec", "batch"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.full) for pair in MORE_PAIRS)],
    ids=str,
)
def test_every_layout_and_codec_is_in_place(
    kind: str, layout: Layout, codec: Codec, batch: int
) -> None:
    cache = jax.eval_shape(lambda: create_layer(REAL[kind][0], codec, batch, 2 * S, layout=layout))
    dtype = codec.dtype if isinstance(codec, Raw) else jnp.bfloat16
    assert_in_place(compiled(layer_step(kind), cache, new_tokens(kind, batch, 1, dtype)), cache)


@pytest.mark.parametrize(
    ("policy", "codec", "batch"),
    [
        (H2O(), Raw(jnp.float32), 1),
        (TOVA(), Raw(jnp.float32), 1),
        (H2O(), Int8(), 8),
        (H2O(), Int4(), 8),
        (SnapKV(), Int8(), 8),
    ],
    ids=str,
)
def test_a_step_that_evicts_is_in_place(policy: Policy, codec: Codec, batch: int) -> None:
    spec, slots = REAL["gqa"][0], 4 * S
    room = 64 if isinstance(policy, SnapKV) else 0
    layout = Evicting(slots - room, policy, room=room)
    cache = jax.eval_shape(lambda: create_layer(spec, codec, batch, 8 * slots, layout=layout))
    dtype = jnp.float32 if isinstance(codec, Raw) else jnp.bfloat16
    step = compiled(layer_step("gqa"), cache, new_tokens("gqa", batch, 1, dtype))
    # The attention that each token got of this step is float32 for each slot and head.
    assert_in_place(step, cache, extra=4 * batch * spec.kv_heads * slots)


@pytest.mark.parametrize(("kind", "batch", "dtype"), USUAL_FIRST)
def test_several_new_tokens_are_in_place(kind: str, batch: int, dtype: str) -> None:
    cache = abstract(kind, batch, DTYPES[dtype])
    step = compiled(layer_step(kind), cache, new_tokens(kind, batch, 5, DTYPES[dtype]))
    assert_in_place(step, cache, extra=activations(kind, batch, 5))


@pytest.mark.parametrize(
    ("number", "batch"), [(4, 1), *(pytest.param(n, 8, marks=pytest.mark.full) for n in (2, 4, 8))]
)
def test_jax_05_a_step_that_flushes_groups_is_in_place(number: int, batch: int) -> None:
    # Codes, scales and the residual of exact tokens, each read and written in the same step.
    codec = Kivi(number, dtype=jnp.bfloat16)
    cache = jax.eval_shape(lambda: create_layer(REAL["gqa"][0], codec, batch, S))
    tokens = new_tokens("gqa", batch, 1, jnp.bfloat16)
    assert_in_place(compiled(layer_step("gqa"), cache, tokens), cache)


def test_a_loop_of_steps_on_the_device_is_in_place() -> None:
    cache, step = abstract("gqa", 1, jnp.float32, layers=2), model_step("gqa")

    def loop(cache: ModelCache, query: Any, key: Any, value: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            return step(carry[1], carry[0], key, value)

        return jax.lax.fori_loop(0, 20, body, (query, cache))

    assert_in_place(compiled(loop, cache, new_tokens("gqa", 1, 1, jnp.float32)), cache)


def test_layers_that_do_not_follow_each_other_are_in_place() -> None:
    # Nothing orders one layer's write after another's read but the step itself.
    cache = abstract("latent", 1, jnp.float32, layers=3)
    how = scoring(REAL["latent"][0])

    def step(cache: ModelCache, query: Any, key: Any, value: Any) -> Any:
        opened = cache.open(query.shape[1])
        made = [opened.layer(i).extend(query, key, value, how) for i in range(3)]
        return sum(out for out, _, _ in made), opened.close([layer for _, _, layer in made])

    found = compiled(step, cache, new_tokens("latent", 1, 5, jnp.float32))
    assert_in_place(found, cache, extra=3 * activations("latent", 1, 5))


def test_rollback_reset_and_flags_are_in_place() -> None:
    cache = abstract("gqa", 8, jnp.bfloat16, layers=2)
    for verb in (lambda c: c.rollback(2), lambda c: c.reset()):
        assert_in_place(jax.jit(verb, donate_argnums=0).lower(cache).compile(), cache)


def test_jax_04_without_donation_nothing_is_aliased() -> None:
    cache = abstract("gqa", 1, jnp.float32)
    args = (cache, *new_tokens("gqa", 1, 1, jnp.float32))
    step = jax.jit(layer_step("gqa")).lower(*args).compile()
    assert step.memory_analysis().alias_size_in_bytes == 0
    plane = 8 * S * 128 * 4
    assert [op.split()[0] for op in cache_sized_ops(step, plane)] == ["copy", "copy"]
    with pytest.raises(AssertionError, match="0 bytes are aliased"):
        assert_in_place(step, cache)


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda x: x.swapaxes(1, 2).copy(), "copy|transpose"),
        (lambda x: x.astype(jnp.bfloat16), "convert"),
        (lambda x: jnp.concatenate([x, x], axis=2), "concatenate"),
        (lambda x: x + 1, "add"),
        (lambda x: (x + 1, x * x), "add|multiply"),
    ],
    ids=["transpose", "convert", "concatenate", "add", "two results"],
)
def test_the_check_sees_each_fault(spoil: Callable[..., Any], kind: str) -> None:
    x = shape(1, 2, 64, 128, dtype=jnp.float32)
    found = cache_sized_ops(jax.jit(spoil).lower(x).compile(), 2 * 64 * 128 * 2)
    assert found and all(op.split()[0] in kind.split("|") for op in found), found


def test_the_check_lets_an_update_pass() -> None:
    x, y = shape(1, 2, 64, 128, dtype=jnp.float32), shape(1, 2, 1, 128, dtype=jnp.float32)

    def update(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(x, 2 * y, (0, 0, 3, 0))

    step = jax.jit(update, donate_argnums=0).lower(x, y).compile()
    assert cache_sized_ops(step, 2 * 64 * 128 * 4) == []
    assert_in_place(step, x)
