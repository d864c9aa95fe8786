# SPDX-License-Identifier: Apache-2.0
"""Padding changes nothing: rows of unequal length equal the same rows alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.testing.suite import Suite, call, quick_jit
from jaxkv.testing.tolerances import assert_close, assert_trees_close, assert_trees_equal


class Padding(Suite):
    """Ragged rows, left padding, rows that are all padding."""

    def test_ragged_rows_equal_rows_alone(self, attn: Any) -> None:
        x, lengths = self.tokens(), np.array([8, 5])
        alone, _ = call(attn, x)  # causal: the first tokens do not see what follows
        other = x.copy()
        other[1, 5:] = 1e3
        for cache in (None, self.cache(attn)):
            y, cache = call(attn, x, cache, lengths=lengths)
            assert_close(y[1, :5], alone[1, :5])
            assert_close(y[0], alone[0])
            assert not y[1, 5:].any(), "padding must give 0"
            z, _ = call(attn, other, None if cache is None else self.cache(attn), lengths=lengths)
            assert_trees_equal(z, y)

    def test_row_01_a_left_padded_batch_equals_rows_alone(self, attn: Any) -> None:
        prompt, steps = self.tokens(length=3), self.tokens(length=4, seed=1)
        alone, _ = call(attn, np.concatenate([prompt, steps], axis=1))
        lone, _ = call(attn, np.concatenate([prompt[:, 2:], steps], axis=1))
        segments = np.array([[1, 1, 1], [0, 0, 1]])
        for cache in (None, self.cache(attn)):
            y, cache = call(attn, prompt, cache, segment_ids=segments)
            assert_close(y[0], alone[0, :3])
            assert_close(y[1, 2:], lone[1, :1])
            assert not y[1, :2].any(), "padding must give 0"
        assert cache is not None and cache.lengths.tolist() == [3, 1]
        for t in range(4):
            y, cache = call(attn, steps[:, t : t + 1], cache)
            assert_close(y[0], alone[0, 3 + t : 4 + t], what=f"step {t}")
            assert_close(y[1], lone[1, 1 + t : 2 + t], what=f"step {t} of the padded row")

    def test_row_05_rows_that_start_later_keep_their_cache(self, attn: Any) -> None:
        x, starts = self.tokens(length=6), (0, 2)
        segments = (np.arange(6)[None] >= np.array(starts)[:, None]).astype(np.int32)
        want, _ = call(attn, x, segment_ids=segments)
        _, cache = call(attn, x[:, :3], self.cache(attn), segment_ids=segments[:, :3])
        for t in range(3, 6):
            y, cache = call(attn, x[:, t : t + 1], cache)
            assert_close(y, want[:, t : t + 1], what=f"step {t}")
        assert cache.lengths.tolist() == [6, 4]

    def test_masks_follow_the_tokens_of_a_padded_row(self, attn: Any) -> None:
        # Keys of a mask count by their order in the row, so the same mask fits with and without
        # padding between the tokens; its query axis is that of the call.
        x, keep = self.tokens(length=4), np.random.default_rng(3).random((4, self.capacity)) < 0.7
        want, _ = call(attn, x, mask=keep[:, :4])
        padded, segments = np.zeros_like(self.tokens()), np.zeros((2, 8), np.int32)
        rows = np.zeros((2, 1, 8, self.capacity), bool)
        places = [[1, 2, 5, 7], [0, 1, 2, 3]]
        for b, place in enumerate(places):
            padded[b, place], segments[b, place], rows[b, 0, place] = x[b], 1, keep
        got, cache = call(attn, padded, self.cache(attn), mask=rows, segment_ids=segments)
        for b, place in enumerate(places):
            assert_close(got[b, place], want[b])
        assert_trees_close(cache, call(attn, x, self.cache(attn))[1])

    def test_nan_01_a_row_that_is_all_padding_gives_finite_gradients(self, attn: Any) -> None:
        def loss(attn: Any, x: Any, cached: bool) -> Any:
            cache = self.cache(attn) if cached else None
            y, _ = attn(x, cache=cache, lengths=np.array([4, 0]))
            return jnp.sum(jnp.square(y))

        x = self.tokens(length=4)
        zeroed = x.copy()
        zeroed[1] = 0.0
        gradient = quick_jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
        for cached in (False, True):
            grads = gradient(attn, x, cached)
            assert_trees_close(grads, gradient(attn, zeroed, cached), 1e-6)
            assert not np.asarray(grads[1])[1].any(), "padding must give no gradient"
            assert np.asarray(grads[1])[0].any()
