# SPDX-License-Identifier: Apache-2.0
"""Eviction against a plain float64 simulation of each policy, and what the verbs do to it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache import (
    H2O,
    TOVA,
    Contiguous,
    Evicting,
    Int8,
    KVSpec,
    LayerCache,
    Raw,
    SnapKV,
    create_layer,
    gather_layers,
    pyramid_budgets,
)
from jaxkv.core.visibility import Visibility
from tests.cache.evictions import HEADS, Row, coded, extend, kept
from tests.cache.support import SPECS, draw_tokens, scoring
from tests.support.tolerances import assert_close

GQA = SPECS["gqa"][0]
WIDTH = 9  # every call is padded to it, or is one token
# What each call adds to the two rows.
CALLS = [(9, 4), (1, 1), (3, 9), (1, 1), (1, 1), (0, 6), (1, 1), (7, 2), (1, 1)]
LAYOUTS = {
    "h2o": Evicting(8, H2O()),
    "h2o, 2 recent": Evicting(7, H2O(recent=2)),
    "h2o, budgets by head": Evicting((5, 8), H2O()),
    "tova": Evicting(8, TOVA()),
    "snapkv": Evicting(6, SnapKV(window=2, kernel=3), room=8),
}


# Those whose scores fall with distance: it is that of the orders, not of the slots.
ALIBI = ("h2o, budgets by head", "snapkv")


def run(
    spec: KVSpec,
    heads: int,
    layout: Evicting,
    codec: Any,
    calls: Any = CALLS,
    slopes: np.ndarray | None = None,
) -> LayerCache:
    how, rng = scoring(spec), np.random.default_rng(5)
    cache = create_layer(spec, codec, 2, 64, layout=layout)
    rows = [Row(spec, layout, slopes) for _ in range(2)]
    for counts in calls:
        length = WIDTH if max(counts) > 1 else 1
        query, key, value = draw_tokens(rng, spec, heads, 2, length)
        stored = [np.asarray(x) for x in coded(codec, spec, key, value)]
        count = jnp.asarray(counts, jnp.int32)
        out, cache = extend(how, cache, query, key, value, count, slopes)
        for b, n in enumerate(counts):
            want = rows[b].step(query[b, :n], stored[0][b, :n], stored[1][b, :n], how.scale)
            assert_close(out[b, :n], want, terms=64 * spec.query_width)
            wanted = [sorted(t.order for t in head) for head in rows[b].heads]
            assert kept(cache, b) == (wanted if cache.layout.per_head else wanted[:1])
    assert not np.asarray(cache.overflowed).any()
    assert cache.lengths.tolist() == [sum(c) for c in zip(*calls, strict=True)]
    return cache


def slopes_of(heads: int) -> np.ndarray:
    return np.linspace(0.1, 0.9, heads, dtype=np.float32)


@pytest.mark.parametrize("name", LAYOUTS)
def test_win_14_a_policy_keeps_what_its_paper_says_and_positions_survive(name: str) -> None:
    slopes = slopes_of(HEADS) if name in ALIBI else None
    run(GQA, HEADS, LAYOUTS[name], Raw(jnp.float32), slopes=slopes)


@pytest.mark.parametrize("name", ["h2o", "tova"])
def test_latents_and_codes_are_evicted_alike(name: str) -> None:
    spec, heads = SPECS["latent"]
    run(spec, heads, LAYOUTS[name], Int8(), slopes=slopes_of(heads))


def test_a_budget_that_is_not_reached_changes_nothing() -> None:
    calls = CALLS[:4]
    cache = run(GQA, HEADS, Evicting(20, H2O()), Raw(jnp.float32), calls)
    back = cache.rollback(jnp.array([3, 2], jnp.int32))
    assert back.lengths.tolist() == [11, 13]
    assert kept(back, 0)[0] == list(range(11)) and kept(back, 1)[0] == list(range(13))


def filled(layout: Any, tokens: int) -> LayerCache:
    """Gives two rows `tokens` tokens, in one call."""
    rng = np.random.default_rng(3)
    cache = create_layer(GQA, Raw(jnp.float32), 2, 64, layout=layout)
    given = draw_tokens(rng, GQA, HEADS, 2, WIDTH)
    return extend(scoring(GQA), cache, *given, jnp.full((2,), tokens, jnp.int32))[1]


def test_a_rollback_is_refused_once_anything_is_evicted() -> None:
    cache = filled(LAYOUTS["h2o"], 9)
    with pytest.raises(ValueError, match=r"rollback of .* rows \[0\]"):
        cache.rollback(jnp.array([1, 0], jnp.int32))
    back = jax.jit(lambda c: c.rollback(jnp.array([1, 0], jnp.int32)))(cache)
    assert back.refused.tolist() == [True, False] and back.lengths.tolist() == [9, 9]
    assert kept(back, 0) == kept(cache, 0)


def test_the_caller_evicts_and_what_is_left_answers_as_if_masked() -> None:
    how, rng = scoring(GQA), np.random.default_rng(4)
    cache = filled(Evicting(8), 8)
    keep = jnp.array([[True, False, True, True, False], [True] * 5])
    evicted = jax.jit(lambda cache, keep: cache.evict(keep))(cache, keep)
    assert kept(evicted, 0) == [[0, 2, 3, 5, 6, 7]]
    assert kept(evicted, 1) == [list(range(8))]
    assert evicted.lengths.tolist() == [8, 8]
    query, key, value = draw_tokens(rng, GQA, HEADS, 2, WIDTH)
    mask = np.ones((2, 1, 1, 64), bool)
    mask[:, 0, 0, :5] = keep
    count = jnp.array([2, 0], jnp.int32)

    @jax.jit
    def masked(cache: LayerCache, query: Any, key: Any, value: Any, mask: Any) -> Any:
        return cache.open(WIDTH, count).extend(query, key, value, how, mask=mask)[0]

    want = masked(filled(Contiguous(), 8), query, key, value, mask)
    got, after = extend(how, evicted, query, key, value, count)
    assert_close(got[0, :2], want[0, :2], terms=128)
    # The freed slots are taken, and another token does not fit.
    assert kept(after, 0) == [[0, 2, 3, 5, 6, 7, 8, 9]]
    full = extend(how, after, query, key, value, jnp.array([1, 0], jnp.int32))[1]
    assert full.overflowed.tolist() == [True, False] and full.lengths.tolist() == [10, 8]


def test_what_left_the_window_goes_first() -> None:
    rng, how = np.random.default_rng(8), scoring(GQA, Visibility(window=4))
    cache = create_layer(GQA, Raw(jnp.float32), 1, 64, layout=Evicting(6, TOVA()))
    plain = create_layer(GQA, Raw(jnp.float32), 1, 64)
    one = jnp.ones((1,), jnp.int32)
    for _ in range(9):
        given = draw_tokens(rng, GQA, HEADS, 1, 1)
        got, cache = extend(how, cache, *given, one)
        want, plain = extend(how, plain, *given, one)
        assert_close(got, want, terms=64)


def test_each_layer_of_a_model_keeps_its_own_and_converts_by_itself() -> None:
    layers = [filled(Contiguous(), 6) for _ in range(2)]
    model = gather_layers(layers)
    assert len(model.indices) == 1
    apart = model.convert(layout=Evicting(8, H2O()))
    assert len(apart.indices) == 2 and apart.groups == (0, 1)
    assert [r.slots for r in apart.layers] == [8, 8]
    assert apart.bytes_per_token == model.bytes_per_token
    with pytest.raises(ValueError, match="cannot keep"):
        model.convert(layout=Evicting(5, TOVA())).convert(layout=Contiguous(), capacity=16)
    whole = model.convert(layout=Evicting(8)).convert(layout=Contiguous(), capacity=16)
    np.testing.assert_array_equal(
        whole.layers[0].planes["key"][:, :, :6], model.layers[0].planes["key"][:, :, :6]
    )
    with pytest.raises(ValueError, match="different tokens"):
        apart.convert(layout=Contiguous(), capacity=16)


def test_bad_sizes_say_what_fits() -> None:
    with pytest.raises(ValueError, match="budget"):
        Evicting(0, H2O())
    with pytest.raises(ValueError, match=r"want a policy such as H2O\(\)"):
        Evicting(4, H2O)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="odd kernel"):
        SnapKV(kernel=4)
    with pytest.raises(ValueError, match="chooses by head"):
        Evicting((3, 4), TOVA())
    with pytest.raises(ValueError, match="3 budgets for 2"):
        create_layer(GQA, Raw(jnp.float32), 1, 16, layout=Evicting((3, 4, 5), H2O()))
    with pytest.raises(ValueError, match="gives tokens up"):
        Evicting(4, H2O()).narrowed(Visibility(causal=False))
    with pytest.raises(ValueError, match=r"want bool\[2, W\]"):
        filled(Evicting(8), 3).evict(jnp.ones((3, 4), bool))


def test_pyramid_budgets_are_the_series_of_the_paper() -> None:
    budgets = pyramid_budgets(1024, 32)
    assert sum(budgets) == 1024 * 32
    # First: 2 x mean - mean / 20; last: mean / 20; evenly in between.
    assert (budgets[0], budgets[-1]) == (1997, 51)
    steps = np.diff(budgets)
    assert steps.min() >= -64 and steps.max() <= -62
