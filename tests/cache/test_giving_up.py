# SPDX-License-Identifier: Apache-2.0
"""Tokens given up in caches of every layout: those that keep them in order move to one of holes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache import (
    Contiguous,
    Evicting,
    Int8,
    Kivi,
    LayerCache,
    Paged,
    Raw,
    Recent,
    Ring,
    create_layer,
    gather_layers,
)
from jaxkv.core.visibility import Visibility
from jaxkv.testing.suite import written
from jaxkv.testing.tolerances import assert_trees_equal
from tests.cache.evictions import HEADS, extend, kept
from tests.cache.meshes import mesh_of, placed
from tests.cache.support import SPECS, draw_tokens, scoring
from tests.support.tolerances import assert_close

GQA = SPECS["gqa"][0]
CAUSAL = scoring(GQA)
WIDTH = 9  # every call is padded to it
KEEP = np.array([[True, False, True, True, False, True], [False] * 3 + [True] * 3])

evict = jax.jit(lambda cache, keep: cache.evict(keep))


def filled(layout: Any, *calls: list[int], codec: Any = None, capacity: int = 16) -> LayerCache:
    """Gives the rows as many tokens in each call; the same whatever the layout."""
    rng = np.random.default_rng(3)
    rows = len(calls[0])
    cache = create_layer(GQA, codec or Raw(jnp.float32), rows, capacity, layout=layout)
    for counts in calls:
        given = draw_tokens(rng, GQA, HEADS, rows, WIDTH)
        cache = extend(CAUSAL, cache, *given, jnp.asarray(counts, jnp.int32))[1]
    return cache


@functools.partial(jax.jit, static_argnums=0)
def masked(how: Any, cache: LayerCache, given: Any, count: Any, mask: Any) -> Any:
    out, _, cache = cache.open(WIDTH, count).extend(*given, how, mask=mask)
    return out, cache.close()


def columns(keep: np.ndarray, capacity: int) -> np.ndarray:
    """Makes the mask `[B, 1, 1, S]` of a cache that has all tokens."""
    mask = np.ones((len(keep), 1, 1, capacity), bool)
    mask[:, 0, 0, : keep.shape[1]] = keep
    return mask


@pytest.mark.parametrize(
    ("layout", "codec"), [(Contiguous(), Int8()), (Paged(4), Raw(jnp.float32))], ids=str
)
def test_what_is_left_answers_as_if_the_others_were_masked(layout: Any, codec: Any) -> None:
    before = filled(layout, [8, 5], codec=codec)
    gone = evict(before, KEEP)
    assert gone.layout == Evicting(16) and gone.lengths.tolist() == [8, 5]
    assert kept(gone, 0) == [[0, 2, 3, 5, 6, 7]] and kept(gone, 1) == [[3, 4]]
    given = draw_tokens(np.random.default_rng(4), GQA, HEADS, 2, WIDTH)
    count = jnp.array([3, 9], jnp.int32)
    whole = filled(Contiguous(), [8, 5], codec=codec)
    want, _ = masked(CAUSAL, whole, given, count, columns(KEEP, 16))
    got, after = extend(CAUSAL, gone, *given, count)
    assert_close(got, want, terms=128)
    # What is left after the last eviction can be taken back, and no more.
    back = jax.jit(lambda cache: cache.rollback(jnp.array([3, 10], jnp.int32)))(after)
    assert back.lengths.tolist() == [8, 14] and back.refused.tolist() == [False, True]
    # A second eviction finds a layout that can.
    assert kept(evict(after, ~KEEP), 1) == [list(range(6, 14))]
    # There is room for as many as were given up: 18 tokens less 2.
    full = extend(CAUSAL, after, *given, jnp.array([7, 0], jnp.int32))[1]
    assert full.lengths.tolist() == [18, 14] and not full.overflowed.any()
    full = extend(CAUSAL, full, *given, jnp.array([1, 0], jnp.int32))[1]
    assert full.lengths.tolist() == [18, 14] and full.overflowed.tolist() == [True, False]


def test_a_ring_goes_on_forgetting() -> None:
    """Row 0 has wrapped, row 1 has not, row 2 is empty; pinned and other tokens are given up."""
    ring = filled(Ring(6, pinned=2), [9, 5, 0], [3, 0, 0], capacity=64)
    keep = np.ones((3, 10), bool)
    keep[0, [0, 7]] = keep[1, 3] = False
    gone = evict(ring, keep)
    assert gone.layout == Evicting(8, Recent(6, 2))
    assert kept(gone, 0) == [[1, 6, 8, 9, 10, 11]] and kept(gone, 1) == [[0, 1, 2, 4]]
    rule = scoring(GQA, Visibility(window=6, pinned=2))
    whole = filled(Contiguous(), [9, 5, 0], [3, 0, 0], capacity=64)
    mask, rng = columns(keep, 64), np.random.default_rng(4)
    for counts in ([1, 4, 9], [9, 1, 0], [2, 9, 1]):
        given, count = draw_tokens(rng, GQA, HEADS, 3, WIDTH), jnp.asarray(counts, jnp.int32)
        want, whole = masked(rule, whole, given, count, mask)
        got, gone = extend(CAUSAL, gone, *given, count)
        assert_close(got, want, terms=128)
    # Those given up leave their slots to others, which no query sees any more.
    assert kept(gone, 0) == [[1, *range(17, 24)]]
    assert kept(gone, 1) == [[0, 1, *range(13, 19)]]
    assert not gone.overflowed.any()


def test_recent_keeps_what_a_ring_keeps() -> None:
    calls = [[9, 4], [1, 9], [0, 6], [7, 1]]
    ring = filled(Ring(6, pinned=2), *calls, capacity=64)
    for recent in (
        filled(Evicting(8, Recent(6, 2)), *calls, capacity=64),
        filled(Contiguous(), *calls, capacity=64).convert(layout=Evicting(8, Recent(6, 2))),
    ):
        assert_trees_equal(written(recent), written(ring))
    given = draw_tokens(np.random.default_rng(4), GQA, HEADS, 2, WIDTH)
    count = jnp.array([5, 1], jnp.int32)
    got, want = (extend(CAUSAL, cache, *given, count)[0] for cache in (recent, ring))
    assert_close(got, want, terms=128)
    for rule, why in (
        (Visibility(causal=False), "asks for all"),
        (Visibility(window=4, pinned=3), "pins fewer"),
    ):
        with pytest.raises(ValueError, match=why):
            extend(scoring(GQA, rule), recent, *given, count)
    with pytest.raises(ValueError, match="pinned of at least 0"):
        Recent(6, -1)
    with pytest.raises(ValueError, match="window"):
        Recent(0)


def test_a_ring_cut_short_by_its_capacity_still_overflows() -> None:
    gone = filled(Ring(12), [8], capacity=10).evict(jnp.zeros((1, 1), bool))
    assert gone.layout == Evicting(10) and kept(gone, 0) == [list(range(1, 8))]
    # As long as it could forget nothing that a query sees, it forgets.
    assert filled(Ring(6, spare=6), [8], capacity=10).evict(KEEP[:1]).layout.policy == Recent(6)


def test_groups_move_one_by_one_and_a_context_stays() -> None:
    one, two = filled(Ring(4), [7, 3], capacity=64), filled(Contiguous(), [7, 3])
    context = create_layer(GQA, Raw(jnp.float32), 2, 5, context=True)
    model = gather_layers([one, context, two, filled(Evicting(12), [7, 3])])
    gone = evict(model, KEEP)
    assert gone.layouts == (Evicting(4, Recent(4)), Evicting(16), Evicting(12), Contiguous())
    assert gone.groups == (0, 3, 1, 2) and gone.steps == 3 and gone.capacity == 12
    for number, layer in ((0, one), (2, two), (3, model.layer(3))):
        assert_trees_equal(written(gone.layer(number)), written(evict(layer, KEEP)))
    assert gone.context_capacity == 5 and gone.layer(1).context


def test_groups_of_tokens_that_are_encoded_as_one_are_not_taken_apart() -> None:
    cache = filled(Contiguous(), [8, 5], codec=Kivi(4, group=2, dtype=jnp.float32))
    with pytest.raises(ValueError, match=r"Evicting.*whole groups of 2 tokens"):
        cache.evict(KEEP)


@pytest.mark.parametrize(("shape", "mode"), [((2, 4), "explicit"), ((8, 1), "auto")])
def test_on_a_mesh_every_device_moves_its_own_rows(shape: tuple[int, int], mode: str) -> None:
    counts = [8, 5, 0, 9, 1, 2, 3, 4]
    keep = np.random.default_rng(5).random((8, 7)) < 0.6
    want = evict(filled(Paged(4), counts), keep)
    walk = [Ring(12), Paged(4), Contiguous()]

    @jax.jit
    def walked(cache: LayerCache) -> LayerCache:
        for layout in walk:
            cache = cache.convert(layout=layout, capacity=12)
        return cache

    whole, mesh = filled(Contiguous(), counts), mesh_of(shape, mode)
    with jax.set_mesh(mesh):
        before = placed(whole, mesh)
        got = evict(before, keep)
        again = walked(before)
        with pytest.raises(ValueError, match=r"pages=40.*splits rows over . devices"):
            before.convert(layout=Paged(4, pages=40))
    assert got.layout == want.layout
    assert [kept(got, row) for row in range(8)] == [kept(want, row) for row in range(8)]
    assert_trees_equal(written(got), written(want))
    assert_trees_equal(written(again), written(before))
    for name, plane in again.records.planes.items():
        assert plane.sharding.is_equivalent_to(before.records.planes[name].sharding, plane.ndim)
