# SPDX-License-Identifier: Apache-2.0
"""Every variant with every layout and codec: exact where the codec is, else within its bound.

By default a covering set runs, in which every pair of two choices meets; `-m full` runs them all.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv
from jaxkv.attention import (
    CrossAttention,
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    ScoreOptions,
)
from jaxkv.attention.base import Call
from jaxkv.attention.latent_view import LatentWeights, absorb
from jaxkv.attention.tokens import uncached_tokens
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
    LayerCache,
    Layout,
    Paged,
    Raw,
    Ring,
    SnapKV,
)
from jaxkv.core.rotary import Rotary
from jaxkv.testing.suite import call, feed, quick_jit
from jaxkv.testing.tolerances import assert_close

ROWS, LENGTH, WIDTH = 2, 12, 16
ROTARY = Rotary(100.0)
VARIANTS = {
    "mha": functools.partial(MultiHeadAttention, WIDTH, 4, rotary=ROTARY),
    "mqa": functools.partial(MultiQueryAttention, WIDTH, 4, rotary=ROTARY),
    "gqa": functools.partial(GroupedQueryAttention, WIDTH, 4, num_kv_heads=2, rotary=ROTARY),
    "mla": functools.partial(MultiHeadLatentAttention, WIDTH, 4, rotary=ROTARY),
    "cross": functools.partial(CrossAttention, WIDTH, 4, context_features=WIDTH),
}


# In the covering set each layout and each codec meets one of them.
ALIBI = ("gqa", "mla")


class Kept(NamedTuple):
    """A layout, and what a module must look at for it to keep all of that."""

    layout: Layout
    options: dict[str, Any]
    rolls_back: int  # tokens, of a row of LENGTH


LAYOUTS = {
    "contiguous": Kept(Contiguous(), {}, 3),
    "ring": Kept(Ring(window=6, spare=3), {"window": 6}, 3),
    "sinks": Kept(Ring(5, pinned=2), {"window": 5, "score": ScoreOptions(pinned=2)}, 0),
    "paged": Kept(Paged(4), {}, 3),
    "evicting": Kept(Evicting(16), {}, 3),
    # Nothing is evicted within the budget, but each head has its own slots.
    "h2o": Kept(Evicting(16, H2O()), {}, 3),
    "tova": Kept(Evicting(16, TOVA()), {}, 3),
    "snapkv": Kept(Evicting(16, SnapKV(window=4)), {}, 3),
}
# As long as nothing is evicted one policy is like another, and 16 bits are kept as 32 are: the
# covering set has the first.
ALIKE = ("tova", "snapkv", "float16", "bfloat16")
CODECS: dict[str, Codec] = {
    "float32": Raw(jnp.float32),
    "bfloat16": Raw(jnp.bfloat16),
    "float16": Raw(jnp.float16),
    "int8": Int8(),
    "int4": Int4(group=4),
    "float8": Float8(),
    "kivi": Kivi(bits=8, group=2, dtype=jnp.float32),
}
# The largest error of a stored number, as a share of the largest magnitude there is: half a step of
# 127 and of 7, half an ulp of 8, 11 and 4 bits; of Kivi half of 255 steps over twice the magnitude.
SHARES = {
    "float32": 0.0,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "int8": 0.5 / 127,
    "int4": 0.5 / 7,
    "float8": 2.0**-4,
    "kivi": 1.0 / 255,
}


class Triple(NamedTuple):
    variant: str
    layout: str
    codec: str

    def __str__(self) -> str:
        return "-".join(self)


def covering(*axes: Sequence[str]) -> list[Triple]:
    """Finds few triples in which every two choices meet: the best one next, first of equals."""
    every = [Triple(*t) for t in itertools.product(*axes)]
    missing = {pair for t in every for pair in pairs(t)}
    chosen = []
    while missing:
        best = max(every, key=lambda t: len(missing & pairs(t)))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def pairs(triple: Triple) -> set[tuple[int, str, int, str]]:
    return {(i, triple[i], j, triple[j]) for i, j in itertools.combinations(range(3), 2)}


def allowed(triple: Triple) -> str | None:
    """Says what the error names if the three mean nothing together."""
    name = LAYOUTS[triple.layout].layout
    if triple.variant == "cross" and isinstance(name, (Ring, Evicting)):
        # A context is read by every query: unless the caller gives tokens up, all of it is kept.
        return "asks for all of them"
    if triple.codec == "kivi" and not isinstance(name, (Contiguous, Paged)):
        return "does not keep whole groups"
    return None


AXES = (list(VARIANTS), list(LAYOUTS), list(CODECS))
COVERED = tuple([name for name in axis if name not in ALIKE] for axis in AXES)
COVERING = covering(*COVERED)
EVERY = [
    t if t in COVERING else pytest.param(t, marks=pytest.mark.full)
    for t in map(Triple._make, itertools.product(*AXES))
]


@functools.cache
def module(variant: str, layout: str) -> Any:
    options = {} if variant == "cross" else dict(LAYOUTS[layout].options)
    if variant in ALIBI:
        score = options.get("score", ScoreOptions())
        options["score"] = dataclasses.replace(score, alibi=True)
    return VARIANTS[variant](**options, rngs=nnx.Rngs(0))


def empty(triple: Triple, rows: int = ROWS) -> LayerCache:
    layout, codec = LAYOUTS[triple.layout].layout, CODECS[triple.codec]
    attn = module(triple.variant, triple.layout)
    return dirty(attn.init_cache(rows, 16, layout=layout, codec=codec))


@quick_jit
def dirty(cache: LayerCache) -> LayerCache:
    """Puts NaN and large codes wherever nothing is stored yet."""

    def spoiled(x: jax.Array) -> jax.Array:
        wrong = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 7
        return jnp.full_like(x, wrong)

    records = jax.tree.map(spoiled, cache.records)
    return type(cache)(cache.index, records, None, cache.layout, cache.replicas, cache.context)


def draw(seed: int, length: int = LENGTH) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(ROWS, length, WIDTH)).astype(np.float32)


@functools.partial(quick_jit, static_argnums=(0, 1))
def rounded(variant: str, codec: Codec, attn: Any, x: Any, context: Any, lengths: Any) -> Any:
    """Attends without a cache to records that went through the codec; gives these as well."""
    if variant == "cross":
        query, record = attn.project_query(x), attn.project_record(context)
    else:
        query, *record = attn.project(x, jnp.arange(LENGTH, dtype=jnp.int32)[None])
    key, value = codec.decode(attn.spec, codec.encode(attn.spec, *record))
    key, value = key.astype(jnp.float32), value.astype(jnp.float32)
    if variant == "cross":
        options = {"causal": False, "key_lengths": lengths, "scale": attn.scale}
        out = jaxkv.dot_product_attention(query, key, value, **options)
    else:
        tokens = uncached_tokens(ROWS, LENGTH, None, None, None)
        out = attn.attend(query, key, value, Call(tokens, None, None, None))
    return attn.out(out), query, record, (key, value)


def truth(triple: Triple, x: np.ndarray, **context: Any) -> tuple[np.ndarray, float]:
    """Gives the output that the codec should, and how far a call may lie from it.

    It is that of records that went through the codec, exactly; and these lie within half a step
    of the given ones. Of Kivi a call sees its own tokens exactly and others through their code, so
    a score moves by at most d = scale sum|q| e, weights by a factor within exp(2 d), and a mix of
    values by (exp(2 d) - 1) max|v| + e; the output projection sums these over its inputs.
    """
    attn, share = module(triple.variant, triple.layout), SHARES[triple.codec]
    grouped = triple.codec == "kivi"
    codec = CODECS["float32" if grouped else triple.codec]
    given = context.get("context"), context.get("context_lengths")
    y, query, record, stored = rounded(triple.variant, codec, attn, x, *given)
    assert_close(y, call(attn, x, **context)[0], 1e-5 if share == 0 or grouped else 1.0)
    sizes = []
    for exact, kept in zip(record, stored, strict=True):
        if exact is None:  # it lies in the key
            continue
        sizes.append(float(jnp.abs(exact).max()))
        assert float(jnp.abs(kept - exact).max()) <= share * sizes[-1] * (1 + 1e-6)
    if not grouped:
        return np.asarray(y), 1e-5
    gain = float(jnp.abs(attn.out.kernel[...]).sum(axis=(0, 1)).max())
    if triple.variant == "mla":  # what moves a latent moves its keys and values
        weights = LatentWeights(attn.key_up[...], attn.value_up[...])
        query = absorb(weights, query)
        gain *= float(jnp.abs(weights.value_up).sum(axis=0).max())
    moved = float(jnp.abs(query).sum(axis=-1).max()) * attn.scale * share * sizes[0]
    return np.asarray(y), gain * (np.expm1(2 * moved) + share) * sizes[-1]


@pytest.mark.parametrize("triple", EVERY, ids=str)
def test_every_variant_with_every_layout_and_codec(triple: Triple) -> None:
    refusal = allowed(triple)
    if refusal is not None:
        with pytest.raises(ValueError, match=refusal):
            empty(triple)
    elif triple.variant == "cross":
        check_context(triple)
    else:
        check_tokens(triple)


def check_tokens(triple: Triple) -> None:
    attn, x = module(triple.variant, triple.layout), draw(0)
    want, limit = truth(triple, x)
    once, whole = given(attn, x, empty(triple), [LENGTH] * ROWS)
    # The calls of 1 token serve the rollback below as well.
    chunks, parts = chunked(attn, x[:, :8], empty(triple))
    singly, parts = feed(attn, x[:, 8:], parts, [1, 1, 1, 1])
    singly = np.concatenate([chunks, singly], axis=1)
    assert_close(once, want, limit, "one call")
    assert_close(singly, want, limit, "chunks and tokens")
    assert parts.lengths.tolist() == whole.lengths.tolist() == [LENGTH] * ROWS
    check_ragged(triple, attn, x, want, limit)
    check_rollback(triple, attn, parts, singly)


def given(attn: Any, x: np.ndarray, cache: LayerCache, counts: Any) -> Any:
    """Calls with the first tokens of each row: of one width, so that one program does for all."""
    padded = np.full((ROWS, LENGTH, WIDTH), np.nan, np.float32)
    for b, n in enumerate(counts):
        padded[b, :n] = x[b, :n]
    return call(attn, padded, cache, lengths=np.asarray(counts, np.int32))


def chunked(attn: Any, x: np.ndarray, cache: LayerCache) -> tuple[np.ndarray, LayerCache]:
    """Feeds 4 tokens at a time."""
    outs = []
    for part in np.split(x, x.shape[1] // 4, axis=1):
        y, cache = given(attn, part, cache, [4] * ROWS)
        outs.append(y[:, :4])
    return np.concatenate(outs, axis=1), cache


def check_ragged(triple: Triple, attn: Any, x: np.ndarray, want: np.ndarray, limit: float) -> None:
    """Feeds the rows different numbers of tokens at a time."""
    cache, done = empty(triple), np.zeros(ROWS, np.int32)
    for counts in ([4, 1], [0, 4], [3, 2]):
        rest = np.stack([np.roll(x[b], -done[b], axis=0) for b in range(ROWS)])
        got, cache = given(attn, rest, cache, counts)
        for b, n in enumerate(counts):
            assert_close(got[b, :n], want[b, done[b] : done[b] + n], limit, f"ragged row {b}")
            assert not got[b, n:].any(), "padding must give 0"
        done += counts
    assert cache.lengths.tolist() == done.tolist() and not np.asarray(cache.overflowed).any()


def check_rollback(triple: Triple, attn: Any, cache: LayerCache, before: np.ndarray) -> None:
    """Takes tokens back, or is refused; swaps the rows; and gives the same tokens again."""
    count = min(2, LAYOUTS[triple.layout].rolls_back)
    back = moved(cache, jnp.full((ROWS,), 2, jnp.int32))
    assert np.asarray(back.refused).tolist() == [count == 0] * ROWS
    assert back.lengths.tolist() == [LENGTH - count] * ROWS
    x = draw(0)[::-1]
    for token in range(LENGTH - count, LENGTH):
        got, back = call(attn, x[:, token : token + 1], back)
        assert_close(got[:, 0], before[::-1, token], what=f"token {token} again")


@quick_jit
def moved(cache: LayerCache, count: jax.Array) -> LayerCache:
    return cache.rollback(count).reorder(jnp.array([1, 0], jnp.int32))


def check_context(triple: Triple) -> None:
    attn, x, context = module(triple.variant, triple.layout), draw(0), draw(9)
    lengths = np.array([LENGTH, 5], np.int32)
    want, limit = truth(triple, x, context=context, context_lengths=lengths)
    first, cache = call(attn, x, empty(triple), context=context, context_lengths=lengths)
    again, cache = call(attn, x, cache)
    assert_close(first, want, limit, "the call that stores the context")
    assert_close(again, want, limit, "a call that reads it")
    assert cache.lengths.tolist() == lengths.tolist()
    swapped, _ = call(attn, x[::-1], quick_jit(lambda c: c.reorder(jnp.array([1, 0])))(cache))
    assert_close(swapped, again[::-1], what="rows change places")


def test_the_covering_set_is_one() -> None:
    every = {pair for t in itertools.product(*COVERED) for pair in pairs(Triple(*t))}
    assert set().union(*map(pairs, COVERING)) == every
    assert len(COVERING) <= len(COVERED[1]) * len(COVERED[2]) + 6
