# SPDX-License-Identifier: Apache-2.0
"""The decode measurements against logits of a model without a cache, and plain loops."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv
from jaxkv.cache import Evicting, Int8, Layout, ModelCache, Paged, Ring, SnapKV
from jaxkv.cache.codecs import Codec
from jaxkv.generation.timing import measure_decoding

VOCAB = 61
TOKENS = np.random.default_rng(5).integers(0, VOCAB, 21).astype(np.int32)
FAST: dict[str, Any] = dict(batches=(), steps=7, repeats=1)


@functools.cache
def model(window: int | None = None) -> jaxkv.Decoder:
    factory = functools.partial(
        jaxkv.GroupedQueryAttention, num_heads=4, rotary=jaxkv.Rotary(), window=window
    )
    return jaxkv.Decoder(VOCAB, 32, 1, factory, rngs=nnx.Rngs(3))


@functools.cache
def uncached(window: int | None = None) -> np.ndarray:
    return np.asarray(model(window)(jnp.asarray(TOKENS)[None])[0][0], np.float64)


def late_loss(logits: np.ndarray) -> float:
    """Scores tokens 10 to 20 of 21, each by the logits of the token before it."""
    losses = []
    for place in range(10, 21):
        chances = np.exp(logits[place - 1]) / np.exp(logits[place - 1]).sum()
        losses.append(-math.log(chances[TOKENS[place]]))
    return sum(losses) / 11


def make(layout: Layout | None = None, codec: Codec | None = None) -> Callable[..., ModelCache]:
    return functools.partial(model().init_cache, layout=layout, codec=codec)


def test_loss_is_that_of_the_second_half_without_a_cache() -> None:
    measured = measure_decoding(model(), TOKENS, **FAST)
    assert measured.loss == pytest.approx(late_loss(uncached()), abs=1e-6)
    np.testing.assert_allclose(measured.logits, uncached(), atol=1e-5)
    assert measured.rates == {}
    assert math.isnan(measure_decoding(model(), TOKENS[:1], batches=(), steps=1).loss)


def test_a_ring_is_measured_as_a_model_with_its_window() -> None:
    measured = measure_decoding(model(), TOKENS, make_cache=make(Ring(5)), **FAST)
    assert measured.loss == pytest.approx(late_loss(uncached(5)), abs=1e-6)
    assert abs(measured.loss - late_loss(uncached())) > 1e-3
    # Without `against`, the gap is to what the model says without a cache.
    gap = np.abs(uncached(5) - uncached()).max()
    assert measured.gap == pytest.approx(gap, abs=1e-5) and gap > 0.01


def test_the_gap_is_to_the_logits_that_are_given() -> None:
    moved = uncached().copy()
    moved[13, 4] += 2.5
    measured = measure_decoding(model(), TOKENS, against=jnp.asarray(moved, jnp.float32), **FAST)
    assert measured.gap == pytest.approx(2.5, abs=1e-4)
    with pytest.raises(ValueError, match=r"against \(20, 61\): want \(21, 61\)"):
        measure_decoding(model(), TOKENS, against=jnp.zeros((20, 61)), **FAST)


@pytest.mark.parametrize(
    ("layout", "codec", "largest"), [(Paged(4), None, 1e-5), (None, Int8(), 0.05)]
)
def test_every_timed_row_has_a_cache_of_its_own(
    layout: Layout | None, codec: Codec | None, largest: float
) -> None:
    sizes, own = [], make(layout, codec)

    def noted(batch: int, capacity: int) -> ModelCache:
        sizes.append((batch, capacity))
        return own(batch, capacity)

    measured = measure_decoding(
        model(), TOKENS, batches=(1, 3), steps=7, repeats=2, make_cache=noted
    )
    # The text, a loop that compiles and two that are timed.
    assert sizes == [(1, 42), (1, 42), (3, 42)]
    assert set(measured.rates) == {1, 3} and min(measured.rates.values()) > 0
    assert (codec is not None and measured.gap > 1e-4) or measured.gap < 1e-5
    assert measured.gap < largest
    assert measured.loss == pytest.approx(late_loss(uncached()), abs=largest)


def test_a_prompt_comes_in_one_call() -> None:
    """SnapKV then keeps its best tokens, and the model is wrong about the text after it alone."""
    layout = Evicting(6, SnapKV(window=2), room=14)
    own, lengths = make(layout), []

    def noted(batch: int, capacity: int) -> ModelCache:
        lengths.append(capacity)
        return own(batch, capacity)

    measured = measure_decoding(model(), TOKENS, prompt=14, make_cache=noted, **FAST)
    assert lengths == [35]
    off = np.abs(np.asarray(measured.logits) - uncached()).max(axis=1)
    assert off[:14].max() < 1e-5 < 1e-3 < off[14:].min()
    with pytest.raises(ValueError, match="13 tokens in loops of 7 steps: want a multiple"):
        measure_decoding(model(), TOKENS, prompt=8, **FAST)
    with pytest.raises(ValueError, match="a prompt of 21 of 21 tokens: want fewer than all"):
        measure_decoding(model(), TOKENS, prompt=21, **FAST)


def test_a_cache_that_drops_tokens_is_not_timed() -> None:
    small = make(Paged(7, pages=11))  # 3 rows of 5 pages would need 15
    with pytest.raises(ValueError, match=r"the cache dropped tokens.*Paged\(size=7, pages=11\)"):
        measure_decoding(model(), TOKENS, batches=(3,), steps=7, repeats=1, make_cache=small)
