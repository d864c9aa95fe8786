# SPDX-License-Identifier: Apache-2.0
"""One model cache whose layers differ in variant, layout, codec and budget."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv
from jaxkv import Contiguous, Evicting, Float8, Int8, Kivi, Paged, Raw, Ring
from jaxkv.testing.tolerances import assert_close

VOCAB, B, T = 61, 2, 12
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(B, T)).astype(np.int32)
OPTIONS: dict[str, Any] = {"num_heads": 4, "rotary": jaxkv.Rotary(100.0)}
LAYERS = [
    functools.partial(jaxkv.GroupedQueryAttention, **OPTIONS),
    functools.partial(jaxkv.MultiHeadLatentAttention, **OPTIONS),
    functools.partial(jaxkv.MultiHeadAttention, window=5, **OPTIONS),
    functools.partial(jaxkv.MultiQueryAttention, **OPTIONS),
]
LAYOUTS = [Paged(4), Evicting(16, jaxkv.H2O()), Ring(5), Contiguous()]
EXACT = Raw(jnp.float32)
# (codecs, how far a logit may be moved): float32 by rounding alone. The bounds of single codecs
# are derived in tests/attention/test_every_cache.py; here a layer mixed up with another would move
# logits, which are of size 1 to 3, by as much as they are large.
CODECS: dict[str, tuple[list[Any], float]] = {
    "exact": ([EXACT] * 4, 1e-5),
    "coded": ([Int8(), EXACT, Float8(), Kivi(4, group=4, dtype=jnp.float32)], 0.3),
}


@functools.cache
def model() -> jaxkv.Decoder:
    return jaxkv.Decoder(VOCAB, 32, 4, LAYERS, rngs=nnx.Rngs(0))


@jax.jit
def called(model: jaxkv.Decoder, tokens: jax.Array, cache: Any = None) -> Any:
    return model(tokens, cache=cache)


# At once more than the ring has, then one by one; or all at once.
@pytest.mark.parametrize(
    "widths", [[8, 1, 1, 1, 1], pytest.param([T], marks=pytest.mark.full)], ids=str
)
@pytest.mark.parametrize("name", [pytest.param("exact", marks=pytest.mark.full), "coded"])
def test_every_layer_may_have_its_own_layout_and_codec(name: str, widths: list[int]) -> None:
    codecs, bound = CODECS[name]
    want, _ = called(model(), TOKENS)
    cache = model().init_cache(B, 16, layout=LAYOUTS, codec=codecs)
    assert [layer.codec for layer in cache.layers] == codecs
    start, parts = 0, []
    for width in widths:
        logits, cache = called(model(), TOKENS[:, start : start + width], cache)
        parts.append(logits)
        start += width
    assert cache.lengths.tolist() == [T] * B and not cache.overflowed.any()
    got = jnp.concatenate(parts, axis=1)
    assert_close(got, want, bound)
    if name == "coded":
        assert float(jnp.max(jnp.abs(got - want))) > 1e-3


@pytest.mark.full
def test_budgets_may_fall_from_layer_to_layer() -> None:
    budgets = jaxkv.pyramid_budgets(6, 4, 3.0)
    assert budgets == [10, 7, 5, 2]
    layouts = [Evicting(budget, jaxkv.TOVA()) for budget in budgets]
    cache = model().init_cache(B, 64, layout=layouts, codec=EXACT)
    assert [layer.slots for layer in cache.layers] == budgets
    want, _ = called(model(), TOKENS[:, :2])
    got, cache = called(model(), TOKENS[:, :2], cache)
    assert_close(got, want)
    for t in range(2, T):
        logits, cache = called(model(), TOKENS[:, t : t + 1], cache)
    assert cache.lengths.tolist() == [T] * B and bool(jnp.isfinite(logits).all())
    held = [np.asarray(index.state.order >= 0).sum(-1).ravel() for index in cache.indices]
    assert [set(x.tolist()) for x in held] == [{budget} for budget in budgets]
