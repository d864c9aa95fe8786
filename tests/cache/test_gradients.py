# SPDX-License-Identifier: Apache-2.0
"""Gradients through cached calls, held against the float64 gradient of one pass and slopes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache import KVSpec, LayerCache, Raw, Scoring, create_layer
from tests.cache.support import (
    RULES,
    SPECS,
    SmallBlocks,
    draw_tokens,
    normal,
    poisoned,
    scoring,
    values_of,
)
from tests.support import dense
from tests.support.tolerances import assert_close, tolerance

B, CAPACITY, CALLS, WIDTH = 3, 13, 2, 6
# Tokens that each call adds to each row: rows run apart, and some calls add nothing to a row.
COUNTS = np.array([[4, 2, 0], [6, 0, 5]])
TOTAL = COUNTS.sum(0)
BY_HEAD = ("sink_logits", "alibi_slopes")


def token_of_call() -> np.ndarray:
    """Numbers the token of each row that each call takes: int `[calls, B, WIDTH]`, -1 padding."""
    start = np.cumsum(COUNTS, axis=0) - COUNTS
    place = np.arange(WIDTH)[None, None]
    return np.where(place < COUNTS[..., None], start[..., None] + place, -1)


def in_calls(spec: KVSpec, how: Scoring, arrays: dict[str, Any], cache: LayerCache) -> Any:
    """Runs all calls: out `[B, S, N, V]`, lse `[B, S, N]` by token, and the cache.

    What stands in padding is NaN.
    """
    outs, lses = [], []
    for number, index in enumerate(token_of_call()):
        safe = jnp.maximum(index, 0)

        def taken(x: jax.Array, safe: Any = safe, index: Any = index) -> jax.Array:
            x = jnp.take_along_axis(x, safe.reshape(*safe.shape, *(1,) * (x.ndim - 2)), axis=1)
            real = (index >= 0).reshape(*index.shape, *(1,) * (x.ndim - 2))
            return jnp.where(real, x, jnp.nan)

        query, key = taken(arrays["query"]), taken(arrays["key"])
        value = taken(arrays["value"]) if "value" in arrays else None
        bias = None
        if "bias" in arrays:  # [N, S, S] by token and key
            bias = jnp.moveaxis(arrays["bias"][:, safe], 0, 1)
        opened = cache.open(WIDTH, jnp.asarray(COUNTS[number], jnp.int32))
        out, lse, written = opened.extend(
            query, key, value, how, bias=bias, **{n: arrays.get(n) for n in BY_HEAD}
        )
        cache = written.close()
        outs.append(out)
        lses.append(lse)
    order = np.concatenate(list(token_of_call()), axis=1)
    place = np.argsort(np.where(order < 0, order.max() + 1, order), axis=1, kind="stable")

    def by_token(parts: list[jax.Array]) -> jax.Array:
        x = jnp.concatenate(parts, axis=1)
        x = jnp.take_along_axis(x, place.reshape(*place.shape, *(1,) * (x.ndim - 2)), axis=1)
        return x[:, : TOTAL.max()]

    return by_token(outs), by_token(lses), cache


def inputs(name: str, extras: bool) -> dict[str, np.ndarray]:
    spec, heads = SPECS[name]
    rng = np.random.default_rng(0)
    tokens = int(TOTAL.max())
    query, key, value = draw_tokens(rng, spec, heads, B, tokens)
    arrays = {"query": query, "key": key}
    if value is not None:
        arrays["value"] = value
    if extras:
        arrays["bias"] = normal(rng, heads, tokens, CAPACITY)
        arrays |= {name: normal(rng, heads) for name in BY_HEAD}
    return arrays


def real_tokens() -> np.ndarray:
    return np.arange(TOTAL.max())[None] < TOTAL[:, None]


def bars(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Draws the loss's gradients by out and lse: 0 where a row has no token."""
    spec, heads = SPECS[name]
    rng = np.random.default_rng(1)
    real = real_tokens()[:, :, None]
    out = normal(rng, B, TOTAL.max(), heads, spec.value_width) * real[..., None]
    return out, normal(rng, B, TOTAL.max(), heads) * real


def loss(name: str, how: Scoring, arrays: dict[str, Any], cache: LayerCache) -> jax.Array:
    out_bar, lse_bar = bars(name)
    out, lse, _ = in_calls(SPECS[name][0], how, arrays, cache)
    return jnp.sum(out * out_bar) + jnp.sum(jnp.where(lse_bar != 0, lse, 0.0) * lse_bar)


def wanted(name: str, how: Scoring, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Computes the gradient of one pass over all tokens, in float64."""
    spec, _ = SPECS[name]
    tokens = arrays["query"].shape[1]
    options = {
        "causal": how.rule.causal,
        "window": how.rule.window,
        "scale": how.scale,
        "soft_cap": how.soft_cap,
        "query_lengths": TOTAL,
        "key_lengths": TOTAL,
        "offset": 0,
    }
    operands = {
        "query": arrays["query"],
        "key": arrays["key"],
        "value": values_of(spec, arrays["key"], arrays.get("value")),
    }
    if "bias" in arrays:
        operands["bias"] = arrays["bias"][None, :, :, :tokens]
        operands |= {name: arrays[name] for name in BY_HEAD}
    grads = dense.attention(operands, options, bars(name)).grads
    if spec.value_offset is not None:
        inside = slice(spec.value_offset, spec.value_offset + spec.value_width)
        grads["key"][..., inside] += grads.pop("value")
    if "bias" in arrays:
        grads["bias"] = np.pad(grads["bias"][0], [(0, 0), (0, 0), (0, CAPACITY - tokens)])
    return grads


def shared_summed(spec: KVSpec, grad: Any) -> np.ndarray:
    """Sums the gradient of what heads share over them: they agree, so only the sum counts."""
    grad = np.array(grad)
    grad[..., spec.key_width :] = grad[..., spec.key_width :].sum(axis=2, keepdims=True)
    return grad


@functools.cache
def gradients(name: str, rule: str, extras: bool) -> Any:
    how = scoring(SPECS[name][0], RULES[rule], soft_cap=4.0 if extras else None)
    cache = poisoned(
        create_layer(SPECS[name][0], Raw(jnp.float32), B, CAPACITY, layout=SmallBlocks())
    )
    run = jax.jit(jax.value_and_grad(functools.partial(loss, name, how)))
    return how, run, cache


CASES = [
    ("gqa", "window", True),
    ("latent", "causal", True),
    ("shared", "window", False),
    pytest.param("gqa", "causal", False, marks=pytest.mark.full),
    pytest.param("middle", "causal", True, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("name", "rule", "extras"), CASES)
def test_jax_16_gradients_equal_those_of_one_pass(name: str, rule: str, extras: bool) -> None:
    spec, arrays = SPECS[name][0], inputs(name, extras)
    how, run, cache = gradients(name, rule, extras)
    _, got = run(arrays, cache)
    want = wanted(name, how, arrays)
    assert got.keys() == want.keys()
    for operand in got:
        a, b = got[operand], want[operand]
        if operand == "key":
            a, b = shared_summed(spec, a), shared_summed(spec, b)
        assert np.asarray(b).any()
        assert_close(a, b, terms=B * int(TOTAL.max()) * spec.query_width, what=operand)


def test_gradients_equal_slopes() -> None:
    name, rule, extras = "gqa", "window", True
    arrays = inputs(name, extras)
    _, run, cache = gradients(name, rule, extras)
    _, grads = run(arrays, cache)
    rng = np.random.default_rng(2)
    for operand, array in arrays.items():
        direction, step = normal(rng, *array.shape), 1e-2
        ends = [
            float(run({**arrays, operand: array + sign * step * direction}, cache)[0])
            for sign in (1, -1)
        ]
        slope, along = (ends[0] - ends[1]) / (2 * step), float(np.vdot(grads[operand], direction))
        # The third derivative times step ** 2, and float32 sums over 2 * step.
        assert abs(slope - along) < 5e-3 * max(1.0, abs(along)), (operand, slope, along)


@pytest.mark.parametrize(
    "stored", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.full)]
)
def test_gradients_in_half_precision(stored: Any) -> None:
    name, arrays = "gqa", inputs("gqa", False)
    how = scoring(SPECS[name][0])
    half = {operand: jnp.asarray(array, stored) for operand, array in arrays.items()}
    cache = poisoned(create_layer(SPECS[name][0], Raw(stored), B, CAPACITY, layout=SmallBlocks()))
    got = jax.jit(jax.grad(functools.partial(loss, name, how)))(half, cache)
    want = wanted(name, how, {operand: np.asarray(x, np.float32) for operand, x in half.items()})
    for operand, grad in got.items():
        assert grad.dtype == stored
        # A token's gradient is summed over calls in the cache's own format.
        size = float(np.abs(want[operand]).max())
        error = np.abs(np.asarray(grad, np.float32) - want[operand]).max()
        assert error <= CALLS * tolerance(stored, terms=64) * size, (operand, error, size)
