# SPDX-License-Identifier: Apache-2.0
"""Rings through a layer's cache: faults seen elsewhere, and what a ring narrows."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.attention import CrossAttention, GroupedQueryAttention, MultiHeadLatentAttention
from jaxkv.attention.options import ScoreOptions
from jaxkv.cache import LayerCache, Raw, Ring, create_layer
from jaxkv.core.rotary import Rotary
from jaxkv.core.visibility import Visibility
from jaxkv.testing.suite import call, feed
from jaxkv.testing.tolerances import assert_close as assert_near
from tests.cache.feeding import fed
from tests.cache.support import SPECS, draw_tokens, scoring
from tests.support.tolerances import assert_close

SPEC, HEADS = SPECS["gqa"]
GIVEN = draw_tokens(np.random.default_rng(0), SPEC, HEADS, 1, 16)


def ring(window: int, **options: int) -> LayerCache:
    return create_layer(SPEC, Raw(jnp.float32), 1, 100, layout=Ring(window, **options))


def slots(cache: LayerCache) -> list[int]:
    """Lists the token in each slot."""
    return np.asarray(cache.layout.places(cache.index, cache.records.slots)[2])[0].tolist()


def stored_as_said(cache: LayerCache) -> None:
    key = np.asarray(cache.records.planes["key"])[0]
    for slot, order in enumerate(slots(cache)):
        if order >= 0:
            np.testing.assert_array_equal(key[:, slot], GIVEN[1][0, order])


def test_win_04_nothing_moves_before_the_ring_is_full() -> None:
    how, cache = scoring(SPEC), fed(scoring(SPEC), ring(8), GIVEN, 0, 6)[2]
    want = {6: [0, 1, 2, 3, 4, 5, 6, -1], 7: [0, 1, 2, 3, 4, 5, 6, 7], 8: [8, 1, 2, 3, 4, 5, 6, 7]}
    for token, places in want.items():
        cache = fed(how, cache, GIVEN, token, token + 1)[2]
        assert slots(cache) == places
        stored_as_said(cache)


def test_win_05_a_ring_that_is_not_full_yet() -> None:
    how = scoring(SPEC, Visibility(window=4))
    cache = fed(how, ring(4), GIVEN, 0, 2)[2]
    whole = fed(how, create_layer(SPEC, Raw(jnp.float32), 1, 16), GIVEN, width=16)[0]
    for token in range(2, 7):
        out, _, cache = fed(how, cache, GIVEN, token, token + 1)
        assert_close(out[0, 0], whole[0, token], terms=64)
        stored_as_said(cache)
        if token == 5:
            assert slots(cache) == [4, 5, 2, 3]


def test_win_06_a_prefill_longer_than_the_window() -> None:
    how = scoring(SPEC)
    out, _, cache = fed(how, ring(4), GIVEN, 0, 10, width=10)
    windowed = scoring(SPEC, Visibility(window=4))
    whole = create_layer(SPEC, Raw(jnp.float32), 1, 16)
    assert_close(out, fed(windowed, whole, GIVEN, 0, 10, width=10)[0], terms=64)
    assert sorted(slots(cache)) == [6, 7, 8, 9]
    stored_as_said(cache)


def test_win_13_sinks_keep_their_positions() -> None:
    # 2 pinned tokens and the last 3 of 8: the query, number 8, sees 0, 1, 6, 7 and itself.
    attn = GroupedQueryAttention(16, 4, rotary=Rotary(50.0), rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(1, 9, 16)).astype(np.float32)
    _, cache = feed(attn, x[:, :8], attn.init_cache(1, 20, layout=Ring(3, pinned=2)), [8])
    assert sorted(slots(cache)) == [0, 1, 5, 6, 7]
    got, _ = call(attn, x[:, 8:], cache)
    mask = np.isin(np.arange(9), [0, 1, 6, 7, 8])
    want, _ = call(attn, x, mask=np.broadcast_to(mask, (9, 9)))
    assert_near(got[:, 0], want[:, 8])


@pytest.mark.parametrize("variant", [GroupedQueryAttention, MultiHeadLatentAttention])
def test_a_ring_makes_a_module_see_what_one_with_its_window_sees(variant: Any) -> None:
    x = np.random.default_rng(0).normal(size=(2, 11, 16)).astype(np.float32)
    plain = variant(16, 4, rotary=Rotary(50.0), rngs=nnx.Rngs(0))
    score = ScoreOptions(pinned=1)
    windowed = variant(16, 4, rotary=Rotary(50.0), window=4, score=score, rngs=nnx.Rngs(0))
    want, _ = call(windowed, x)
    for widths in ([11], [1] * 11, [3, 7, 1], [6, 5]):
        for attn in (plain, windowed):
            cache = attn.init_cache(2, 11, layout=Ring(4, pinned=1))
            got, cache = feed(attn, x, cache, widths)
            assert_near(got, want, what=f"{widths}")
            assert cache.records.slots == 5 and cache.lengths.tolist() == [11, 11]


def test_a_ring_cut_short_by_its_capacity_fills_up() -> None:
    how = scoring(SPEC)
    short = create_layer(SPEC, Raw(jnp.float32), 1, 6, layout=Ring(8))
    assert short.capacity == 6 and short.records.slots == 6
    out, _, cache = fed(how, short, GIVEN, 0, 8)
    assert cache.lengths.tolist() == [6] and cache.overflowed.tolist() == [True]
    want = fed(how, create_layer(SPEC, Raw(jnp.float32), 1, 8), GIVEN, 0, 8)[0]
    assert_close(out[:, :6], want[:, :6], terms=64)
    assert ring(8).capacity == 2**31 - 1


def test_what_a_ring_cannot_keep_is_refused() -> None:
    x = CrossAttention(16, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="keeps the last tokens only"):
        x.init_cache(1, 8, layout=Ring(4))
    pinned = GroupedQueryAttention(16, 4, window=4, score=ScoreOptions(pinned=2), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="pins fewer tokens than"):
        pinned.init_cache(1, 8, layout=Ring(4))
    with pytest.raises(ValueError, match="has no fixed key axis"):
        plain = GroupedQueryAttention(16, 4, rngs=nnx.Rngs(0))
        cache = plain.init_cache(1, 100, layout=Ring(4))
        plain(jnp.ones((1, 2, 16)), cache=cache, mask=jnp.ones((2, 100), bool))
    with pytest.raises(ValueError, match="window=0: want an int"):
        Ring(0)
    with pytest.raises(ValueError, match="pinned and spare of at least 0"):
        Ring(4, spare=-1)
