# SPDX-License-Identifier: Apache-2.0
"""The one rule that says which key a query sees."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxkv.core.visibility import Visibility, visible
from tests.support import dense

RULES = [
    *(Visibility(causal, None) for causal in (True, False)),
    *(Visibility(True, window, pinned) for window in (1, 2, 4) for pinned in (0, 1, 3)),
    *(
        Visibility(causal, window, pinned)
        for causal in (True, False)
        for window in ((0, 0), (2, 0), (0, 2), (1, 3))
        for pinned in (0, 3)
    ),
    # Sizes that int32 does not hold, or not with an order added to them.
    *(
        Visibility(causal, window, pinned)
        for causal in (True, False)
        for window in ((2, 2**31 - 1), (2**31 - 1, 2), (2**40, 2**31), (2**30, 2**30 - 1))
        for pinned in (0, 3)
    ),
    Visibility(True, 2**31),
]
QUERIES = np.arange(-2, 9)
KEYS = np.arange(-1, 9)


def table(rule):
    """Decides key by key: bool `[queries, keys]`."""
    return np.array(
        [
            [dense.sees(i, j, rule.causal, rule.window, rule.pinned) for j in KEYS.tolist()]
            for i in QUERIES.tolist()
        ]
    )


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rule_matches_its_definition(rule):
    got = rule.allows(jnp.asarray(QUERIES)[:, None], jnp.asarray(KEYS)[None])
    assert got.dtype == bool
    np.testing.assert_array_equal(got, table(rule))


def test_win_01_a_window_counts_the_query_itself():
    order = jnp.arange(8)
    seen = Visibility(window=4).allows(order[:, None], order[None])
    assert seen.sum(1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4]


def test_each_row_of_a_chunk_has_its_own_window():
    seen = Visibility(window=3).allows(jnp.arange(6, 10)[:, None], jnp.arange(10)[None])
    assert [np.flatnonzero(row).tolist() for row in np.asarray(seen)] == [
        [4, 5, 6],
        [5, 6, 7],
        [6, 7, 8],
        [7, 8, 9],
    ]


def test_a_window_is_the_same_by_both_spellings():
    for W in range(1, 5):
        np.testing.assert_array_equal(
            table(Visibility(window=W)), table(Visibility(False, (W - 1, 0)))
        )


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 3), (2, 5), (7, 7)])
def test_reach_bounds_what_is_seen(rule, low, high):
    first, end = (int(x) for x in rule.reach(jnp.int32(low), jnp.int32(high)))
    rows = (low <= QUERIES) & (high >= QUERIES)
    seen = KEYS[table(rule)[rows].any(0)]
    assert first <= seen.min() and seen.max() < end
    if not rule.pinned:
        # No block is read for nothing: the bounds are the first and last key that are seen.
        assert first == seen.min()
        assert end == seen.max() + 1 or seen.max() == KEYS.max()


def test_reach_takes_one_pair_of_orders_per_row():
    first, end = Visibility(window=3).reach(jnp.array([0, 7]), jnp.array([1, 9]))
    assert first.tolist() == [0, 5] and end.tolist() == [2, 10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window=0: want W >= 1 keys"),
        ({"window": -2}, "window=-2: want W >= 1 keys"),
        ({"window": (-1, 0)}, r"window=\(-1, 0\): want W >= 1 keys, or \(left, right\) >= 0"),
        ({"window": (1, 2, 3)}, r"window=\(1, 2, 3\): want"),
        ({"window": 4, "causal": False}, r"window=4 with causal=False .* for example \(3, 0\)"),
        ({"window": np.int64(4), "causal": False}, "window=4 with causal=False"),
        ({"window": 2, "pinned": -1}, "pinned=-1: want >= 0"),
        ({"pinned": 1}, "pinned=1: want >= 0, and a window"),
    ],
)
def test_rules_that_mean_nothing_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        Visibility(**arguments)


def test_alignment_matters_for_causal_and_windows_only():
    assert Visibility().needs_alignment
    assert Visibility(False, (1, 1)).needs_alignment
    assert not Visibility(False).needs_alignment


def test_a_rule_is_a_static_argument():
    traces = []

    def f(x, rule):
        traces.append(rule)
        return rule.allows(x, x)

    program = jax.jit(f, static_argnums=1)
    for window in (2, 2, 3):
        program(jnp.arange(3), Visibility(window=window))
    assert [rule.window for rule in traces] == [2, 3]


@hypothesis.given(st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=20)
def test_rule_segments_and_mask_are_all_asked(seed):
    rng = np.random.default_rng(seed)
    B, N, T, S = 2, 2, 3, 4
    options = {
        "causal": True,
        "query_order": rng.integers(0, 5, (B, T)),
        "key_order": rng.integers(-1, 5, (B, S)),
        "query_segments": rng.integers(0, 3, (B, T)),
        "key_segments": rng.integers(0, 3, (B, S)),
        "mask": rng.random((B, N, 1, S)) > 0.3,
    }
    got = visible(Visibility(), *(jnp.asarray(x) for x in list(options.values())[1:]))
    np.testing.assert_array_equal(got, dense.visible((B, N, T, S), options))


@pytest.mark.parametrize("lone", [("q_order",), ("k_order",), ("q_order", "k_order")], ids="+".join)
def test_one_row_of_orders_serves_every_row_of_segments(lone):
    q_order = jnp.zeros((1 if "q_order" in lone else 2, 3), jnp.int32)
    k_order = jnp.zeros((1 if "k_order" in lone else 2, 4), jnp.int32)
    seen = visible(
        Visibility(), q_order, k_order, jnp.ones((2, 3), jnp.int32), jnp.ones((2, 4), jnp.int32)
    )
    assert seen.shape == (2, 1, 3, 4) and seen.all()


def test_without_segments_nothing_is_repeated_over_rows():
    order = jnp.arange(3)[None]
    assert visible(Visibility(), order, order).shape == (1, 1, 3, 3)
