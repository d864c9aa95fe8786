# SPDX-License-Identifier: Apache-2.0
"""Attention inside vmap, grad and jacobian."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.suite import QUICK, bars_for, call, normal, operands
from tests.support import dense
from tests.support.tolerances import assert_close

NAMES = ("query", "key", "value", "bias")
COPIES = 3


def stacked(name, shape):
    return np.stack([normal(f"{name} {i}", *shape) for i in range(COPIES)])


@pytest.fixture
def arrays():
    return operands() | {"bias": normal("bias", 3, 5)}


def quick(fn):
    return jax.jit(fn, compiler_options=QUICK)


@pytest.mark.parametrize(
    "batched",
    [("query",), ("key", "value"), NAMES],
    ids="-".join,
)
def test_jax_12_vmap_over_some_operands(implementation, arrays, batched):
    axes = {name: 0 if name in batched else None for name in NAMES}
    given = {n: stacked(n, x.shape) if n in batched else x for n, x in arrays.items()}
    options = {"causal": True, "offset": 2}
    out, lse = quick(jax.vmap(lambda a: call(a, options, implementation), in_axes=(axes,)))(given)
    for i in range(COPIES):
        one = {n: x[i] if n in batched else x for n, x in given.items()}
        want = dense.attention(one, options)
        assert_close(out[i], want.out)
        assert_close(lse[i], want.lse)


def test_jax_12_vmap_over_offsets_and_lengths(implementation, arrays):
    offsets, lengths = np.array([-1, 0, 3]), np.array([[5, 1], [0, 2], [3, 3]])

    def one(offset, lengths):
        options = {"causal": True, "offset": offset, "key_lengths": lengths}
        return call(arrays, options, implementation)[0]

    out = quick(jax.vmap(one))(offsets, lengths)
    for i in range(COPIES):
        options = {"causal": True, "offset": offsets[i], "key_lengths": lengths[i]}
        assert_close(out[i], dense.attention(arrays, options).out)


@pytest.mark.parametrize("batched", [("query",), NAMES], ids="-".join)
def test_jax_12_vmap_of_grad(implementation, arrays, batched):
    axes = {name: 0 if name in batched else None for name in NAMES}
    given = {n: stacked(n, x.shape) if n in batched else x for n, x in arrays.items()}
    bars = bars_for(arrays)
    options = {"causal": True, "offset": np.array([1, -1])}

    def loss(arrays):
        out, lse = call(arrays, options, implementation)
        return jnp.sum(out * bars[0]) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0) * bars[1])

    grads = quick(jax.vmap(jax.grad(loss), in_axes=(axes,)))(given)
    for i in range(COPIES):
        one = {n: x[i] if n in batched else x for n, x in given.items()}
        want = dense.attention(one, options, bars).grads
        for name, grad in grads.items():
            assert_close(grad[i], want[name], terms=24, what=name)


def test_jax_12_jacobian(implementation):
    arrays = operands(B=1, T=2, S=3, N=2, K=1, H=2, V=2)
    options = {"causal": True, "offset": 0}
    got = quick(jax.jacobian(lambda a: call(a, options, implementation)[0]))(arrays)
    shape = (1, 2, 2, 2)
    for index in np.ndindex(*shape):
        bar = np.zeros(shape)
        bar[index] = 1
        want = dense.attention(arrays, options, (bar, np.zeros(shape[:3]))).grads
        for name, jacobian in got.items():
            assert_close(jacobian[index], want[name], what=(name, index))


def test_offsets_and_lengths_do_not_retrace(implementation, arrays):
    traces = 0

    @quick
    def program(offset, lengths):
        nonlocal traces
        traces += 1
        options = {"causal": True, "offset": offset, "key_lengths": lengths}
        return call(arrays, options, implementation)

    for offset in range(3):
        program(np.int32(offset), np.array([offset, 2], np.int32))
    assert traces == 1
