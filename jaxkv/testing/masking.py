# SPDX-License-Identifier: Apache-2.0
"""Windows, masks and biases, each held to a call that needs none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.testing.suite import Suite, call, feed
from jaxkv.testing.tolerances import assert_close

HIDDEN = 2  # the key that a mask hides, or a bias counts twice


class Masking(Suite):
    """Which keys a query sees, and how much."""

    def test_a_window_shows_so_many_keys(self) -> None:
        attn, x, window = self.rotated(window=3), self.tokens(), 3
        want, _ = call(attn, x)
        # Rotations are relative, so the last of three tokens alone is what a window of 3 sees.
        parts = np.stack([x[:, t - 2 : t + 1] for t in range(2, 8)], axis=1).reshape(-1, 3, 16)
        alone, _ = call(self.rotated(), parts)
        assert_close(want[:, window - 1 :], alone[:, -1].reshape(2, 6, -1))
        got, _ = feed(attn, x, self.cache(attn), [4, 4])
        assert_close(got, want)

    def test_a_mask_hides_keys(self, attn: Any) -> None:
        x, order = self.tokens(), np.delete(np.arange(8), HIDDEN)
        want, _ = call(attn, x[:, order], positions=order[None].astype(np.int32))
        keep = np.arange(self.capacity) != HIDDEN
        for got in self._both(attn, x, keep, np.zeros(self.capacity)):
            assert_close(got[:, order], want)

    def test_a_bias_of_log_two_counts_a_key_twice(self, attn: Any) -> None:
        x, twice = self.tokens(), np.insert(np.arange(8), HIDDEN, HIDDEN)
        want, _ = call(attn, x[:, twice], positions=twice[None].astype(np.int32))
        # The second copy is inserted before the first, so its query sees one copy only.
        want, bias = np.delete(want, HIDDEN, axis=1), np.zeros(self.capacity)
        bias[HIDDEN] = np.log(2.0)
        for got in self._both(attn, x, np.ones(self.capacity, bool), bias):
            assert_close(got, want)

    def _both(
        self, attn: Any, x: np.ndarray, mask: np.ndarray, bias: np.ndarray
    ) -> list[np.ndarray]:
        """Calls without a cache and with one, in two chunks."""
        bias, length = bias.astype(np.float32), x.shape[1]
        whole, _ = call(attn, x, mask=mask[:length], bias=bias[:length])
        cache, outs = self.cache(attn), []
        for part in (x[:, :4], x[:, 4:]):
            y, cache = call(attn, part, cache, mask=mask, bias=bias)
            outs.append(y)
        return [whole, np.concatenate(outs, axis=1)]

    @pytest.mark.parametrize("name", ["mask", "bias"])
    def test_chk_04_a_wrong_width_raises(self, attn: Any, name: str) -> None:
        dtype = jnp.bool_ if name == "mask" else jnp.float32
        for cache, width, want in ((None, 9, 8), (self.cache(attn), 8, 12)):
            given = {name: jnp.ones((8, width), dtype)}
            with pytest.raises(ValueError, match=rf"{name} \(8, {width}\) does not fit.*S={want}"):
                jax.eval_shape(attn, self.tokens(), cache=cache, **given)
