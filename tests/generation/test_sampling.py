# SPDX-License-Identifier: Apache-2.0
"""Filters against their definitions, and draws against the probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.generation.sampling import Sampling, filtered, sample


def probabilities(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


LOGITS = np.random.default_rng(0).normal(size=(5, 37)).astype(np.float32) * 2


def kept(sampling: Sampling, logits: np.ndarray = LOGITS) -> np.ndarray:
    return np.isfinite(np.asarray(filtered(jnp.asarray(logits), sampling)))


@pytest.mark.parametrize("k", [1, 5, 36, 37, 100])
def test_top_k_keeps_the_k_largest(k: int) -> None:
    rank = np.argsort(np.argsort(-LOGITS, axis=-1), axis=-1)
    np.testing.assert_array_equal(kept(Sampling(1.0, top_k=k)), rank < k)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_top_p_keeps_the_fewest_tokens_that_reach_p(p: float, temperature: float) -> None:
    got = kept(Sampling(temperature, top_p=p))
    for row, mask in zip(probabilities(LOGITS / temperature), got, strict=True):
        order = np.argsort(-row)
        count = int(np.searchsorted(np.cumsum(row[order]), p - 1e-9)) + 1
        want = np.zeros(row.size, bool)
        want[order[:count]] = True
        np.testing.assert_array_equal(mask, want)


@pytest.mark.parametrize("m", [0.01, 0.3, 1.0])
def test_min_p_compares_with_the_most_likely(m: float) -> None:
    p = probabilities(LOGITS)
    np.testing.assert_array_equal(
        kept(Sampling(1.0, min_p=m)), p >= m * p.max(-1, keepdims=True) * (1 - 1e-6)
    )


def test_filters_apply_one_after_the_other() -> None:
    both = kept(Sampling(1.0, top_k=4, top_p=0.7))
    after_k = np.where(kept(Sampling(1.0, top_k=4)), LOGITS, -np.inf)
    np.testing.assert_array_equal(both, kept(Sampling(1.0, top_p=0.7), after_k))
    assert both.sum() < kept(Sampling(1.0, top_k=4)).sum()


def test_draws_follow_the_probabilities() -> None:
    logits = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))
    keys = jax.random.split(jax.random.key(1), 4000)
    draws = sample(jnp.broadcast_to(logits, (4000, 4)), keys, Sampling(1.0, top_k=3))
    share = np.bincount(np.asarray(draws), minlength=4) / 4000
    # Standard error of a share is at most 0.5 / sqrt(4000) = 0.008; four of them.
    np.testing.assert_allclose(share, np.array([0.5, 0.3, 0.15, 0]) / 0.95, atol=0.032)
    assert share[3] == 0


def test_greedy_takes_the_largest() -> None:
    keys = jax.random.split(jax.random.key(1), 5)
    got = sample(jnp.asarray(LOGITS), keys, Sampling())
    np.testing.assert_array_equal(got, LOGITS.argmax(-1))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (dict(temperature=-1.0), "temperature=-1.0"),
        (dict(top_k=0), "top_k=0"),
        (dict(top_p=0.0), "top_p=0.0"),
        (dict(min_p=1.5), "min_p=1.5"),
    ],
)
def test_bad_settings_are_named(bad: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Sampling(**bad)
