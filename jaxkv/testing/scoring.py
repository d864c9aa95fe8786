# SPDX-License-Identifier: Apache-2.0
"""Score options and dropout: each has an effect, and the same one with and without a cache."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxkv.attention.options import ScoreOptions
from jaxkv.testing.suite import Suite, call, feed, quick_jit
from jaxkv.testing.tolerances import assert_close, assert_trees_equal

OPTIONS: dict[str, Any] = {"soft_cap": 0.5, "sink_logits": True, "qk_norm": True, "alibi": True}


class Scoring(Suite):
    """Scale, soft-cap, sinks, QK-norm, dropout."""

    @pytest.mark.parametrize("name", list(OPTIONS))
    def test_a_score_option_has_an_effect(self, attn: Any, name: str) -> None:
        score = ScoreOptions(**{name: OPTIONS[name]})
        if name in self.unsupported:
            with pytest.raises(ValueError, match=name):
                self.rotated(score=score)
            return
        x = self.tokens()
        plain, changed = call(attn, x)[0], call(self.rotated(score=score), x)[0]
        assert np.abs(changed - plain).max() > 1e-2, f"{name} is ignored"

    def test_score_options_act_alike_with_and_without_a_cache(self) -> None:
        options = {k: v for k, v in OPTIONS.items() if k not in self.unsupported}
        attn, x = self.rotated(score=ScoreOptions(**options)), self.tokens()
        assert_close(feed(attn, x, self.cache(attn), [4, 4])[0], call(attn, x)[0])

    def test_sco_07_a_given_scale_is_the_scale(self, attn: Any) -> None:
        x, same = self.tokens(), self.rotated(score=ScoreOptions(scale=attn.scale))
        assert_trees_equal(call(same, x)[0], call(attn, x)[0])
        # Scores that are multiplied by 0 weigh all keys alike: outputs are running means.
        flat = self.rotated(score=ScoreOptions(scale=0.0))
        alone = np.concatenate([call(attn, x[:, t : t + 1])[0] for t in range(8)], axis=1)
        want = np.cumsum(alone, axis=1) / np.arange(1, 9)[None, :, None]
        assert_close(call(flat, x)[0], want)
        assert_close(feed(flat, x, self.cache(flat), [4, 4])[0], want)

    def test_drp_01_deterministic_ignores_rngs(self, attn: Any) -> None:
        dropping, x = self.rotated(dropout_rate=0.5), self.tokens()
        want, _ = call(attn, x)
        assert_trees_equal(call(dropping, x)[0], want)

        @quick_jit
        def run(attn: Any, x: Any, key: Any) -> Any:
            return attn(x, deterministic=True, rngs=nnx.Rngs(dropout=key))[0]

        for seed in (0, 1):
            assert_trees_equal(run(dropping, x, jax.random.key(seed)), want)

    def test_drp_03_dropout_drops_and_keeps_the_mean(self) -> None:
        attn, x = self.rotated(dropout_rate=0.5), self.tokens(rows=1, length=4)

        def run(key: jax.Array) -> jax.Array:
            y, _ = attn(x, deterministic=False, rngs=nnx.Rngs(dropout=key))
            return y

        ys = np.asarray(quick_jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 2000)))
        assert np.abs(ys[0] - ys[1]).max() > 1e-2, "two keys drop alike"
        assert_close(ys.mean(axis=0), call(attn, x)[0], 0.05)
