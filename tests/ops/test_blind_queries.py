# SPDX-License-Identifier: Apache-2.0
"""Queries that see nothing, and rubbish where no key is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.ops.blockwise import Blockwise
from tests.ops.suite import (
    QUICK,
    Interpreted,
    bars_for,
    call,
    check,
    normal,
    operands,
    outputs,
    outputs_and_gradients,
)
from tests.support import dense
from tests.support.tolerances import assert_close

# Each hides every key from some query of operands().
BLINDING = {
    "mask": {"mask": np.array([[True] * 5, [False] * 5, [True] * 5])},
    "no-keys": {"key_lengths": np.array([0, 3])},
    "before-the-keys": {"causal": True, "offset": np.array([-2, 0])},
    "past-the-window": {"causal": True, "window": 2, "offset": np.array([4, 9])},
    "unfilled": {"key_order": np.full((1, 5), -1)},
    "padding-query": {
        "query_segments": np.array([[0, 1, 1], [1, 1, 0]]),
        "key_segments": np.ones((2, 5), int),
    },
    "other-document": {
        "query_segments": np.array([[1, 2, 1], [2, 2, 1]]),
        "key_segments": np.ones((2, 5), int),
    },
    "no-query": {"query_lengths": np.array([0, 2])},
}


@pytest.mark.parametrize("options", BLINDING.values(), ids=BLINDING)
def test_nan_02_a_query_that_sees_nothing_gives_0(implementation, options):
    out, lse, _ = check(implementation, operands(), **options)  # compares exactly: see compare
    blind = np.isneginf(lse)
    assert blind.any()
    np.testing.assert_array_equal(out[blind], 0)


def test_nan_01_gradients_beside_a_query_that_sees_nothing(implementation):
    arrays = operands(B=2, T=4, S=4)
    mask = np.ones((2, 1, 4, 4), bool)
    mask[0, :, 1] = False
    bars = [bar.copy() for bar in bars_for(arrays)]
    for bar in bars:
        bar[0, 1] = 0  # left out of the loss
    grads = outputs_and_gradients(implementation, arrays, tuple(bars), jit=True, mask=mask)[2]
    arrays["query"][0, 1] = 0
    zeroed = outputs_and_gradients(implementation, arrays, tuple(bars), jit=True, mask=mask)[2]
    want = dense.attention(arrays, {"mask": mask}, tuple(bars)).grads
    for name, grad in grads.items():
        assert_close(grad, zeroed[name], what=name)
        assert_close(grad, want[name], what=name)


def test_nan_03_padding_and_causal_together(implementation):
    arrays = operands(B=1, T=4, S=4)
    options = {"causal": True, "query_segments": np.array([[0, 0, 1, 1]])}
    out, _, _ = check(implementation, arrays, jit=True, **options)
    assert not out[:, :2].any()
    alone = {name: x[:, 2:] for name, x in arrays.items()}
    assert_close(out[:, 2:], dense.attention(alone, {"causal": True}).out)


def test_nan_06_more_blind_queries_than_a_grid_holds(implementation):
    B, T, N = 7, 1000, 10  # 70,000 rows
    arrays = operands(B=B, T=T, S=2, N=N, K=1, H=1, V=1)
    out, lse = outputs(implementation, arrays, jit=True, mask=np.zeros(2, bool))
    assert out.size == 70_000
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


# Each leaves the last two keys of every row without a token.
UNFILLED = {
    "lengths": {"key_lengths": np.array([3, 3])},
    "orders": {"key_order": np.array([[0, 1, 2, -1, -1]])},
    "segments": {
        "query_segments": np.ones((2, 3), int),
        "key_segments": np.array([[1, 1, 1, 0, 0]] * 2),
    },
}


@pytest.mark.parametrize("rubbish", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("options", UNFILLED.values(), ids=UNFILLED)
def test_nan_09_rubbish_behind_the_length_reaches_nothing(implementation, options, rubbish):
    options = {"causal": True, "offset": 1, "soft_cap": 3.0} | options
    arrays = operands()
    bars = bars_for(arrays)
    for name in ("key", "value"):
        arrays[name][:, 3:] = 0
    clean = outputs_and_gradients(implementation, arrays, bars, **options)
    for name in ("key", "value"):
        arrays[name][:, 3:] = rubbish
    dirty = outputs_and_gradients(implementation, arrays, bars, **options)
    np.testing.assert_array_equal(dirty[0], clean[0])
    np.testing.assert_array_equal(dirty[1], clean[1])
    for name, grad in dirty[2].items():
        np.testing.assert_array_equal(grad, clean[2][name])
    for name in ("key", "value"):
        assert not dirty[2][name][:, 3:].any()


def test_rubbish_in_padding_queries_reaches_no_gradient(implementation):
    arrays = operands()
    options = {"query_lengths": np.array([1, 2])}
    clean = outputs_and_gradients(implementation, arrays, bars_for(arrays), **options)
    arrays["query"][0, 1:] = arrays["query"][1, 2:] = np.nan
    dirty = outputs_and_gradients(implementation, arrays, bars_for(arrays), **options)
    np.testing.assert_array_equal(dirty[0], clean[0])
    for name, grad in dirty[2].items():
        np.testing.assert_array_equal(grad, clean[2][name])


def test_hidden_keys_with_huge_scores_leave_gradients_alone(implementation):
    # exp of a hidden score overflows: a `where` behind it still multiplies its gradient by 0.
    arrays = operands()
    arrays["key"][:, [1, 4]] *= 1e4
    check(implementation, arrays, mask=np.array([True, False, True, True, False]))


def test_a_nan_that_is_seen_is_not_hidden(implementation):
    arrays = operands() | {"sink_logits": normal("sink", 4)}
    arrays["key"][0, 1] = np.nan
    out, _ = outputs(implementation, arrays)
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


def test_zer_01_a_row_with_no_keys_beside_one_with_some(implementation):
    arrays = operands()
    out, lse, _ = check(implementation, arrays, key_lengths=np.array([0, 3]))
    assert not out[0].any() and np.isneginf(lse[0]).all()
    row = {"query": arrays["query"][1:]} | {n: arrays[n][1:, :3] for n in ("key", "value")}
    assert_close(out[1:], dense.attention(row).out)


@pytest.mark.parametrize(("B", "T", "S"), [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_zer_05_no_rows_no_queries_no_keys(implementation, B, T, S):
    arrays = operands(B=B, T=T, S=S) | {"sink_logits": normal("sink", 4)}
    out, lse, grads = check(
        implementation, arrays, jit=True, causal=True, offset=0, key_lengths=np.full(B, S)
    )
    assert out.shape == (B, T, 4, 3) and not out.any()
    assert lse.shape == (B, T, 4)
    assert all(not grads[name].any() for name in ("query", "key", "value"))
    bare = outputs(implementation, operands(B=B, T=T, S=S), jit=True)
    assert not bare[0].any() and np.isneginf(bare[1]).all()


def test_second_derivatives_beside_a_blind_query_are_finite(implementation):
    arrays = {name: jnp.asarray(x) for name, x in operands().items()}
    options = {"key_lengths": jnp.array([0, 3])}

    def loss(arrays):
        return jnp.sum(jnp.square(call(arrays, options, implementation)[0]))

    def twice(arrays):
        return jax.jvp(jax.grad(loss), (arrays,), (arrays,))[1]

    program = jax.jit(twice, compiler_options=QUICK)
    if isinstance(implementation, Blockwise | Interpreted):
        with pytest.raises(TypeError, match="forward-mode"):
            program(arrays)
        return
    for name, x in program(arrays).items():
        assert np.isfinite(x).all(), name
        assert not np.asarray(x)[0].any(), name
