# SPDX-License-Identifier: Apache-2.0
"""What the compiled decode loops do with a cache: nothing that is as large as it is."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxkv
from jaxkv.generation import Beams, Decoding, PromptLookup, Sampling
from jaxkv.generation import loop as generate_loop
from jaxkv.generation.decoding import Given, How
from jaxkv.generation.sampling import draw_of
from jaxkv.testing.hlo import cache_sized_ops

pytestmark = pytest.mark.as_shipped

ROWS, LARGE = 2, 4096


def model(*kinds: Any) -> jaxkv.Decoder:
    """Makes the shapes of a model in which every weight is smaller than a plane."""
    layers = [functools.partial(kind, num_heads=4) for kind in kinds]
    make = functools.partial(jaxkv.Decoder, 97, 64, len(kinds), layers)
    return nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))


def loop(built: jaxkv.Decoder, decoding: Decoding, cache: Any) -> Any:
    """Compiles the decode loop, and gives the shapes of its state."""
    given = Given(*(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((ROWS, 8), (ROWS,))), None, None)
    how = How(draw_of(Sampling()), jnp.zeros((0,), jnp.int32), 8)
    graph, state = generate_loop._parted(decoding)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), ROWS))
    logits = jax.ShapeDtypeStruct((ROWS, built.vocab), jnp.float32)
    carry = jax.eval_shape(
        lambda *given: decoding.begin(how, given[0], None, *given[1:]), given, logits, cache, keys
    )
    graphs, states = zip(generate_loop._parted(built), (graph, state), strict=True)
    tokens = jax.ShapeDtypeStruct((), jnp.int32)
    return generate_loop._decode.lower(graphs, how, states, carry, tokens).compile(), carry


@pytest.mark.parametrize(
    "layout", [jaxkv.Contiguous(), pytest.param(jaxkv.Paged(64), marks=pytest.mark.full)]
)
def test_speculation_is_in_place(layout: Any) -> None:
    built = model(jaxkv.GroupedQueryAttention)
    cache = jax.eval_shape(lambda: built.init_cache(ROWS, LARGE, layout=layout))
    compiled, carry = loop(built, PromptLookup(3, draft=4), cache)
    planes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(carry.cache) if x.ndim == 4]
    assert cache_sized_ops(compiled, min(planes)) == []
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(planes)


def test_spc_07_no_step_moves_a_context() -> None:
    built = model(jaxkv.GroupedQueryAttention, jaxkv.CrossAttention)
    cache = jax.eval_shape(lambda: built.init_cache(ROWS, 16, context_capacity=LARGE))
    compiled, carry = loop(built, Beams(3), cache)
    planes = [x for x in jax.tree.leaves(carry.cache) if x.ndim == 4 and x.shape[2] == LARGE]
    assert [x.shape[0] for x in planes] == [3 * ROWS] * 2
    size = planes[0].size * planes[0].dtype.itemsize
    assert cache_sized_ops(compiled, size) == []
    # A reorder of everything does move it.
    rows = jax.ShapeDtypeStruct((3 * ROWS,), jnp.int32)
    moved = jax.jit(lambda c, r: c.reorder(r), donate_argnums=0).lower(carry.cache, rows)
    assert len(cache_sized_ops(moved.compile(), size)) >= 2
