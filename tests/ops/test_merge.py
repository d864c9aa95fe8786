# SPDX-License-Identifier: Apache-2.0
"""Joining attention over parts of the keys."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.ops.merge import add_sink, merge
from tests.ops.suite import QUICK, bars_for, call, compare, normal, operands
from tests.support import dense
from tests.support.tolerances import assert_close

INF = np.inf


def in_parts(arrays, cuts, options, implementation, filled=None):
    """Attends to the keys `cuts[i] .. cuts[i + 1]` apart, merges, and adds the sinks once."""
    arrays = dict(arrays)
    sinks = arrays.pop("sink_logits", None)
    parts = []
    for start, end in itertools.pairwise(cuts):
        part = {
            "query": arrays["query"],
            "key": arrays["key"][:, start:end],
            "value": arrays["value"][:, start:end],
        }
        order = jnp.arange(start, end, dtype=jnp.int32)[None]
        if filled is not None:
            order = jnp.where(order < filled[:, None], order, -1)
        parts.append(call(part, options | {"key_order": order}, implementation))
    return add_sink(*merge(*zip(*parts, strict=True)), sinks)


def part(seed, *, empty=()):
    """Draws one part's output `[2, 3, 4]` and lse `[2, 3]`, with rows that saw nothing."""
    out, lse = normal(f"out {seed}", 2, 3, 4), normal(f"lse {seed}", 2, 3, times=3.0)
    for row in empty:
        out[row], lse[row] = 0, -INF
    return jnp.asarray(out), jnp.asarray(lse)


def test_fla_11_two_parts_equal_one_pass(implementation):
    arrays = operands(S=10)
    options = {"causal": True, "offset": jnp.array([0, 7])}
    want = dense.attention(arrays, options)

    def every_cut(arrays):
        cuts = (0, 1, 4, 9, 10)
        return [in_parts(arrays, (0, cut, 10), options, implementation) for cut in cuts]

    for out, lse in jax.device_get(jax.jit(every_cut, compiler_options=QUICK)(arrays)):
        compare(arrays, (out, lse, {}), want)
        np.testing.assert_allclose(out, want.out, rtol=0, atol=1e-6)


def test_fla_12_an_empty_part_changes_no_bit():
    real, empty = part(0), part(1, empty=[(0,), (1,)])
    for parts in ([real, empty], [empty, real], [empty, real, empty], [real]):
        out, lse = merge(*zip(*parts, strict=True))
        np.testing.assert_array_equal(out, real[0])
        np.testing.assert_array_equal(lse, real[1])


def test_fla_12_empty_parts_alone_give_0():
    out, lse = merge(*zip(part(0, empty=[(0,), (1,)]), part(1, empty=[(0,), (1,)]), strict=True))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -INF)


def test_fla_12_gradients_of_partly_empty_parts_are_finite():
    # Row 0 is empty in both parts, row 1 in the second, row 2 in none.
    parts = [part(0, empty=[(0, 0), (1, 0)]), part(1, empty=[(0, 0), (1, 0), (0, 1), (1, 1)])]

    def loss(parts):
        out, lse = merge(*zip(*parts, strict=True))
        return jnp.sum(jnp.square(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))

    program = jax.jit(jax.grad(loss), compiler_options=QUICK)
    (one_out, one_lse), (two_out, two_lse) = jax.device_get(program(parts))
    for grad in (one_out, one_lse, two_out, two_lse):
        assert np.isfinite(grad).all()
        assert not grad[:, 0].any()
    assert not two_out[:, 1].any() and not two_lse[:, 1].any()
    assert_close(one_out[:, 1], 2 * parts[0][0][:, 1])
    np.testing.assert_array_equal(one_lse[:, 1], 1)
    assert two_out[:, 2].all() and two_lse[:, 2].all()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_merge_is_the_average_by_exp_lse(count):
    parts = [part(seed) for seed in range(count)]
    out, lse = merge(*zip(*parts, strict=True))
    shares = np.exp([np.asarray(x).astype(np.float64) for _, x in parts])
    want = sum(s[..., None] * np.asarray(o) for s, (o, _) in zip(shares, parts, strict=True))
    assert_close(out, want / shares.sum(0)[..., None])
    assert_close(lse, np.log(shares.sum(0)))


@pytest.mark.parametrize("level", [-1e4, -100.0, 100.0, 1e4])
def test_merge_does_not_care_how_large_scores_are(level):
    (a, x), (b, y) = part(0), part(1)
    out, lse = merge([a, b], [x, y])
    far_out, far_lse = merge([a, b], [x + level, y + level])
    # The lse's own rounding at such a size is all that may differ.
    np.testing.assert_allclose(far_out, out, rtol=0, atol=2e-6 + 1e-7 * abs(level))
    np.testing.assert_allclose(far_lse - level, lse, rtol=0, atol=1e-6 + 1e-7 * abs(level))


def test_merge_gives_float32_for_16_bit_parts():
    (a, x), (b, y) = part(0), part(1)
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    out, lse = merge([a, b], [x, y])
    assert out.dtype == lse.dtype == jnp.float32
    wide = merge([a.astype(jnp.float32), b.astype(jnp.float32)], [x, y])
    np.testing.assert_array_equal(out, wide[0])


def test_sco_04_a_sink_is_counted_once(implementation):
    arrays = {
        "query": np.zeros((1, 1, 1, 1), np.float32),
        "key": np.zeros((1, 2, 1, 1), np.float32),
        "value": np.eye(2, dtype=np.float32).reshape(1, 2, 1, 2),
        "sink_logits": np.zeros(1, np.float32),
    }

    def in_1_2_and_4_parts(arrays):
        every = ((0, 2), (0, 1, 2), (0, 1, 1, 2, 2))
        return [in_parts(arrays, cuts, {}, implementation) for cuts in every]

    for out, lse in jax.jit(in_1_2_and_4_parts, compiler_options=QUICK)(arrays):
        assert_close(out.ravel(), [1 / 3, 1 / 3])
        assert_close(lse.item(), np.log(3))


def test_sco_04_parts_and_sinks_match_float64_with_gradients(implementation):
    arrays = operands(S=10) | {"sink_logits": normal("sink", 4)}
    filled = np.array([9, 0])  # row 1 holds nothing at all
    want = dense.attention(arrays, {"key_lengths": filled}, bars_for(arrays))

    def run(arrays, bars):
        def f(arrays):
            return in_parts(arrays, (0, 3, 3, 10), {}, implementation, jnp.asarray(filled))

        outs, pull = jax.vjp(f, arrays)
        return outs, pull(bars)[0]

    program = jax.jit(run, compiler_options=QUICK)
    (out, lse), grads = jax.device_get(program(arrays, bars_for(arrays)))
    compare(arrays, (out, lse, grads), want)


@pytest.mark.parametrize("outs", [[], [(2, 3), (3, 3)], [(2, 3)]])
def test_parts_that_do_not_fit_raise(outs):
    lses = [jnp.zeros(4)] if len(outs) == 1 else [jnp.zeros(x[:-1]) for x in outs]
    with pytest.raises(ValueError, match="want"):
        merge([jnp.zeros(x) for x in outs], lses)


def test_add_sink_without_sinks_is_nothing():
    out, lse = part(0)
    assert add_sink(out, lse, None) == (out, lse)
