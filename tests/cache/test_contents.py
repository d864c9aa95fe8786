# SPDX-License-Identifier: Apache-2.0
"""What stands in which slot, who sees it, and what is refused: faults that other caches had."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache import KVSpec, LayerCache, ModelCache, Raw, Scoring, create_layer, gather_layers
from jaxkv.core.visibility import Visibility
from tests.cache.feeding import extended, fed
from tests.cache.support import bits, poisoned

ONE = KVSpec(1, 1, 1)
EVEN = Scoring(Visibility(), 1.0)


def numbered(first: int, count: int) -> Any:
    """Makes tokens whose key and value are their number; queries are 0, so weights are even."""
    x = np.arange(first, first + count, dtype=np.float32).reshape(1, -1, 1, 1)
    x = np.broadcast_to(x, (2, count, 1, 1))
    return np.zeros_like(x), x, x


def ones(capacity: int = 8) -> LayerCache:
    """Makes a cache of two rows and one channel."""
    return create_layer(ONE, Raw(jnp.float32), 2, capacity)


def slots(cache: LayerCache, row: int = 0, plane: str = "value") -> list[float]:
    return np.asarray(cache.records.planes[plane])[row, 0, :, 0].tolist()


def test_cac_01_a_write_past_the_end_touches_nothing_stored() -> None:
    _, _, cache = fed(EVEN, ones(), numbered(0, 6))
    with pytest.raises(ValueError, match=r"\[4 4\] new tokens do not fit: rows hold \[6 6\] of 8"):
        cache.open(4)
    _, _, over = fed(EVEN, cache, numbered(60, 4), counts=[4, 2])
    assert slots(over) == slots(over, 1) == [0, 1, 2, 3, 4, 5, 60, 61]
    assert over.lengths.tolist() == [8, 8] and over.overflowed.tolist() == [True, False]
    # The flag stays; a call that overflows again raises again, and one that fits does not.
    with pytest.raises(ValueError, match=r"do not fit.*rows \[0, 1\]"):
        over.open(1)
    again = over.rollback(3)
    assert again.overflowed.tolist() == [True, False]
    assert again.open(1).close().overflowed.tolist() == [True, False]
    assert over.reset().overflowed.tolist() == [False, False]


def test_a_refused_rollback_raises_and_changes_nothing() -> None:
    _, _, cache = fed(EVEN, ones(), numbered(0, 3))
    with pytest.raises(ValueError, match=r"rollback of \[1 4\] .* rows hold \[3 3\]; rows \[1\]"):
        cache.rollback(jnp.array([1, 4]))
    rollback = jax.jit(lambda c, count: c.rollback(count))
    after = rollback(cache, jnp.array([1, 4]))
    assert after.lengths.tolist() == [2, 3] and after.refused.tolist() == [False, True]
    with pytest.raises(ValueError, match="rollback"):
        after.rollback(4)
    assert after.rollback(1).refused.tolist() == [False, True]
    after = rollback(cache, jnp.array([-1, -1]))
    assert after.lengths.tolist() == [3, 3] and after.refused.all()


def test_a_row_that_is_not_there_cannot_be_copied() -> None:
    _, _, cache = fed(EVEN, ones(), numbered(0, 3))
    for rows in ([0, 2], [-1, 0]):
        with pytest.raises(ValueError, match="of a cache of 2"):
            cache.reorder(jnp.array(rows))
    forked = jax.jit(lambda c: c.fork(jnp.array([1, 2, -1])))(cache)
    assert forked.lengths.tolist() == [3, 0, 0]
    assert forked.refused.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        (lambda c: c.rollback(jnp.zeros(3, jnp.int32)), r"\(3,\): want int32 \(2,\)"),
        (lambda c: c.reset(jnp.zeros(2, jnp.int32)), r"want bool\(2,\)"),
        (lambda c: c.reorder(jnp.zeros(3, jnp.int32)), r"\(3,\): want \(2,\)"),
        (lambda c: c.fork(jnp.zeros(3)), "want int32"),
        (lambda c: c.convert(lanes=0), "lanes=0"),
        (lambda c: c.open(3, jnp.array([4, 0])), "0 to 3"),
        (lambda c: c.open(3, jnp.array([4])), r"want int32 \(2,\)"),
        (lambda c: c.open(2, jnp.array([1, 1]), jnp.ones((2, 2), jnp.int32)), "one of them"),
        (lambda c: c.open(2, None, jnp.ones((2, 3), jnp.int32)), r"want \(2, 2\)"),
        (lambda c: c.open(3, None, jnp.array([[1, 1, 2], [1, 1, 1]])), "one nonzero id"),
        (lambda c: c.close(), "no open step"),
        (lambda c: gather_layers([c]).close([c]), "no open step"),
        (lambda c: create_layer(ONE, Raw(jnp.float32), 1, 0), "capacity=0"),
        (lambda c: create_layer(ONE, Raw(), 1, 1), "has no dtype"),
        (lambda c: Raw(jnp.int8), "float dtype"),
        (lambda c: KVSpec(1, 4, 3, value_offset=2), "do not lie inside"),
    ],
)
def test_what_does_not_fit_raises(verb: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        verb(ones())


@pytest.mark.parametrize("width", [1, 3, 7, 9])
def test_chk_04_a_mask_of_another_width_raises(width: int) -> None:
    for options in ({"mask": jnp.ones((3, width), bool)}, {"bias": jnp.ones((2, 1, 3, width))}):
        with pytest.raises(ValueError, match=rf"{width}\) does not fit.* S=8"):
            ones().extend(*numbered(0, 3), EVEN, **options)


def test_cac_03_padding_of_the_last_chunk_runs_past_the_end() -> None:
    prompt = numbered(0, 10)
    _, _, want = fed(EVEN, ones(10), prompt, width=10)
    cache = ones(10)
    for first in (0, 4, 8):
        _, _, cache = fed(EVEN, cache, prompt, first, first + 4, width=4)
    assert slots(cache) == list(range(10)) and not cache.overflowed.any()
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


def test_cac_06_every_token_is_stored_the_first_one_too() -> None:
    for count in (1, 5):
        _, _, cache = fed(EVEN, ones(), numbered(3, count))
        assert slots(cache, plane="key")[:count] == list(range(3, 3 + count))
        assert slots(cache)[:count] == list(range(3, 3 + count))
        assert cache.lengths.tolist() == [count, count]


def test_msk_05_each_row_sees_its_own_fill() -> None:
    _, _, cache = fed(EVEN, jax.jit(poisoned)(ones()), numbered(0, 5), counts=[5, 3])
    out, lse, _ = fed(EVEN, cache, numbered(10, 2))
    # Equal scores: the output is the mean of what is seen, and exp(lse) its number.
    np.testing.assert_allclose(np.exp(lse[..., 0]), [[6, 7], [4, 5]], rtol=1e-6)
    means = [[(10 + 10) / 6, (10 + 21) / 7], [(3 + 10) / 4, (3 + 21) / 5]]
    np.testing.assert_allclose(out[..., 0, 0], means, rtol=1e-6)


def test_row_06_a_row_goes_on_when_another_leaves() -> None:
    # Padding is never stored: a row of 3 real tokens goes on at slot 3, whoever is beside it.
    segments = jnp.array([[1, 1, 1, 1, 1], [0, 0, 7, 7, 7]])
    opened = jax.jit(lambda c: c.open(5, segment_ids=segments))(ones())
    assert opened.plan.order.tolist() == [[0, 1, 2, 3, 4], [2, 3, 4, 0, 1]]
    assert opened.close().lengths.tolist() == [5, 3]
    _, _, both = fed(EVEN, ones(), numbered(0, 5), counts=[5, 3])
    alone = jax.jit(lambda c: c.fork(jnp.array([1, 1])))(both)
    out, _, alone = fed(EVEN, alone, numbered(9, 1))
    assert slots(alone) == [0, 1, 2, 9, 0, 0, 0, 0]
    np.testing.assert_allclose(out.ravel(), [(0 + 1 + 2 + 9) / 4] * 2)


def test_sco_04_a_sink_is_counted_once_wherever_the_cache_ends() -> None:
    # Two equal scores and a sink of 0: row 0 has both tokens new, row 1 has one of them stored.
    values = np.array([[3.0, 6.0], [3.0, 6.0]], np.float32).reshape(2, 2, 1, 1)
    zeros, sink = np.zeros_like(values), jnp.zeros(1)
    _, _, cache = extended(EVEN, ones(), (zeros, zeros, values), jnp.array([0, 1]))
    given = (zeros, zeros, np.concatenate([values[:1], values[1:, ::-1]]))
    out, lse, _ = extended(EVEN, cache, given, jnp.array([2, 1]), sink_logits=sink)
    np.testing.assert_allclose([out[0, 1, 0, 0], out[1, 0, 0, 0]], [(3 + 6) / 3] * 2, rtol=1e-6)
    np.testing.assert_allclose(np.exp([lse[0, 1, 0], lse[1, 0, 0]]), [3, 3], rtol=1e-6)


def test_layers_of_unequal_capacity_drop_alike() -> None:
    cache = gather_layers([ones(8), ones(5)])
    assert cache.groups == (0, 1) and cache.capacity == 5

    @jax.jit
    def step(cache: ModelCache, given: Any, counts: Any) -> ModelCache:
        opened = cache.open(4, counts)
        return opened.close([opened.layer(i).extend(*given, EVEN)[2] for i in range(2)])

    cache = step(cache, numbered(0, 4), jnp.array([4, 1]))
    cache = step(cache, numbered(4, 4), jnp.array([4, 4]))
    assert [i.lengths.tolist() for i in cache.indices] == [[5, 5], [5, 5]]
    assert [i.overflowed.tolist() for i in cache.indices] == [[True, False]] * 2
    for number in range(2):
        layer = cache.layer(number)
        assert slots(layer, 0)[:5] == [0, 1, 2, 3, 4]
        assert slots(layer, 1)[:5] == [0, 4, 5, 6, 7]
    back = jax.jit(lambda c: c.rollback(jnp.array([6, 2])))(cache)
    assert [i.lengths.tolist() for i in back.indices] == [[5, 3], [5, 3]]
    assert [i.refused.tolist() for i in back.indices] == [[True, False]] * 2
    with pytest.raises(ValueError, match="of 5; rows"):
        cache.open(1)
