# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention: the conformance suite, Flax's own module, and the formula in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flax import nnx

from jaxkv.attention import MultiHeadAttention, ScoreOptions
from jaxkv.cache import Paged, Ring
from jaxkv.core.numerics import Numerics
from jaxkv.core.rotary import Rotary
from jaxkv.testing.conformance import AttentionConformance
from jaxkv.testing.suite import call, feed
from jaxkv.testing.tolerances import assert_close
from tests.attention.formulas import LIKE_GROUPED_QUERY, head_attention, parameters, perturbed
from tests.ops.suite import IMPLEMENTATIONS

X = np.random.default_rng(0).normal(size=(2, 6, 16)).astype(np.float32)


class TestConformance(AttentionConformance):
    in_full = LIKE_GROUPED_QUERY
    variant = MultiHeadAttention


@pytest.mark.parametrize("causal", [True, False])
def test_equals_the_multi_head_attention_of_flax(causal: bool) -> None:
    # Flax computes in the dtype that inputs and parameters promote to: float32 here.
    theirs = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(1))
    ours = perturbed(MultiHeadAttention(16, 4, causal=causal, use_bias=True, rngs=nnx.Rngs(0)))
    for name in ("query", "key", "value", "out"):
        for part in ("kernel", "bias"):
            source = getattr(getattr(ours, name), part)
            target = getattr(getattr(theirs, name), part)
            assert source.shape == target.shape
            target[...] = source[...]
    mask = nnx.make_causal_mask(np.ones((2, 6))) if causal else None
    want = theirs(X, mask=mask)
    assert_close(call(ours, X)[0], want)
    if causal:
        assert_close(feed(ours, X, ours.init_cache(2, 8), [3, 3])[0], want)


CASES: dict[str, tuple[dict[str, Any], float | None, dict[str, Any]]] = {
    "plain": ({}, None, {}),
    "biases": ({"use_bias": True}, None, {}),
    "biases but the output's": ({"use_bias": "qkv"}, None, {}),
    "rotary": ({"rotary": Rotary(50.0)}, 50.0, {}),
    "not causal": ({"causal": False}, None, {"causal": False}),
    "window": ({"window": 2}, None, {"window": 2}),
    "window of two sides": (
        {"causal": False, "window": (1, 2)},
        None,
        {"causal": False, "window": (1, 2)},
    ),
    "pinned": ({"window": 2, "score": ScoreOptions(pinned=1)}, None, {"window": 2, "pinned": 1}),
    "scale": ({"score": ScoreOptions(scale=0.7)}, None, {"scale": 0.7}),
    "soft-cap": ({"score": ScoreOptions(soft_cap=0.6)}, None, {"soft_cap": 0.6}),
    "sinks": ({"score": ScoreOptions(sink_logits=True)}, None, {}),
    "qk-norm, rotary": ({"rotary": Rotary(50.0), "score": ScoreOptions(qk_norm=True)}, 50.0, {}),
}


@pytest.mark.parametrize("name", list(CASES))
def test_equals_the_formula_in_float64(name: str) -> None:
    options, theta, meaning = CASES[name]
    attn = perturbed(MultiHeadAttention(16, 4, **options, rngs=nnx.Rngs(0)))
    want = head_attention(parameters(attn), X, theta, meaning)
    assert_close(call(attn, X)[0], want)
    if attn.rule.causal:
        assert_close(feed(attn, X, attn.init_cache(2, 7), [3, 3])[0], want)


@pytest.mark.parametrize("cached", [False, pytest.param(True, marks=pytest.mark.full)])
def test_mla_08_key_and_value_widths_differ_on_every_path(cached: bool) -> None:
    attn = MultiHeadAttention(
        16, 4, head_dim=6, value_dim=4, out_features=5, rotary=Rotary(50.0), rngs=nnx.Rngs(0)
    )
    attn = perturbed(attn)
    want = head_attention(parameters(attn), X, 50.0)
    # The same paths with these widths through every codec: tests/cache/test_random_verbs.py.
    paths: list[tuple[Numerics, tuple[Any, ...]]] = [(Numerics(), (None, Paged(4), Ring(7)))]
    each = (Paged(4),) if cached else ()
    paths += [(Numerics(implementation=i), each) for i in IMPLEMENTATIONS.values()]
    for numerics, layouts in paths:
        other = MultiHeadAttention(
            *(16, 4),
            head_dim=6,
            value_dim=4,
            out_features=5,
            rotary=Rotary(50.0),
            numerics=numerics,
            rngs=nnx.Rngs(0),
        )
        nnx.update(other, nnx.state(attn))
        assert_close(call(other, X)[0], want)
        for layout in layouts:
            cache = other.init_cache(2, 7, layout=layout)
            assert_close(feed(other, X, cache, [3, 3])[0], want, what=f"{numerics}, {layout}")


def test_sco_06_a_scale_that_is_not_the_head_widths() -> None:
    # Gemma 2: query_pre_attn_scalar 168 with heads of 128 channels.
    attn = MultiHeadAttention(
        16, 2, head_dim=128, score=ScoreOptions(scale=168**-0.5), rngs=nnx.Rngs(0)
    )
    assert attn.scale == pytest.approx(0.0771517, abs=1e-7)
    assert MultiHeadAttention(16, 2, head_dim=128, rngs=nnx.Rngs(0)).scale == pytest.approx(
        0.0883883, abs=1e-7
    )
    attn = perturbed(attn)
    want = head_attention(parameters(attn), X, None, {"scale": 0.0771517})
    assert_close(call(attn, X)[0], want, 1e-4)
    assert_close(feed(attn, X, attn.init_cache(2, 7), [3, 3])[0], want, 1e-4)
