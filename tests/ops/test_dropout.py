# SPDX-License-Identifier: Apache-2.0
"""Dropout of attention weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.ops.api import attention
from tests.ops.suite import QUICK, call, check, kept, operands, outputs
from tests.support import dense
from tests.support.tolerances import assert_close

RATE = 0.4


def test_drp_03_weights_are_dropped_or_scaled_up(implementation):
    one, two = (kept(implementation, jax.random.key(seed), RATE) for seed in (0, 1))
    for keep in (one, two):
        assert_close(keep * (1 - RATE), np.round(keep * (1 - RATE)))
        assert set(np.round(keep * (1 - RATE)).ravel()) == {0, 1}
    assert (np.round(one) != np.round(two)).any()
    # Rows and heads draw for themselves.
    assert (np.round(one[0]) != np.round(one[1])).any()
    assert (np.round(one[:, 0]) != np.round(one[:, 1])).any()


def test_drp_03_outputs_and_gradients_match_float64_with_the_same_mask(implementation):
    options = {"causal": True, "offset": np.array([1, 2]), "dropout_key": jax.random.key(3)}
    visible = {k: options[k] for k in ("causal", "offset")}
    keep = kept(implementation, options["dropout_key"], RATE, **visible)
    keep = np.round(keep * (1 - RATE)) / (1 - RATE)
    arrays = operands() | {"sink_logits": np.linspace(-1, 1, 4, dtype=np.float32)}
    out, lse, _ = check(implementation, arrays, keep=keep, dropout_rate=RATE, **options)
    bare_out, bare_lse = outputs(implementation, arrays, **visible)
    assert (out != bare_out).any()
    np.testing.assert_array_equal(lse, bare_lse)  # the normaliser is that of all keys


def test_drp_03_mean_over_keys_is_the_output_without_dropout(implementation):
    arrays = {name: jnp.asarray(x) for name, x in operands(B=1, N=2).items()}
    arrays["query"] *= 0.3  # no key takes nearly all the weight

    def one(key):
        return call(arrays, {"dropout_rate": 0.5, "dropout_key": key}, implementation)[0]

    mean = jax.jit(lambda keys: jnp.mean(jax.vmap(one)(keys), axis=0), compiler_options=QUICK)
    got = mean(jax.random.split(jax.random.key(0), 2000))
    want = dense.attention(arrays).out
    # The mean of 2000 draws strays by about sqrt(sum of (w v)^2 / 2000) = 0.01.
    np.testing.assert_allclose(got, want, rtol=0, atol=0.05)
    assert np.abs(want).max() > 0.5  # half of it, unscaled, would show


def test_rate_0_is_no_dropout(implementation):
    key = jax.random.key(0)
    for got, want in zip(
        outputs(implementation, operands(), dropout_rate=0.0, dropout_key=key),
        outputs(implementation, operands()),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


def test_old_keys_serve_too(implementation):
    options = {"dropout_rate": RATE, "implementation": implementation}
    old = attention(**operands(), dropout_key=jax.random.PRNGKey(3), **options)
    new = attention(**operands(), dropout_key=jax.random.key(3), **options)
    np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(("rate", "key"), [(1.0, 0), (-0.1, 0), (0.5, None)])
def test_wrong_rates_and_missing_keys_raise(implementation, rate, key):
    key = key if key is None else jax.random.key(key)
    with pytest.raises(ValueError, match=rf"dropout_rate={rate}: want \[0, 1\) and a dropout_key"):
        attention(**operands(), dropout_rate=rate, dropout_key=key, implementation=implementation)


def test_dropout_is_the_same_compiled(implementation):
    key = jax.random.key(5)
    eager, _ = outputs(implementation, operands(), dropout_rate=RATE, dropout_key=key)
    program = jax.jit(
        lambda arrays, key: call(
            arrays, {"dropout_rate": RATE, "dropout_key": key}, implementation
        )[0],
        compiler_options=QUICK,
    )
    assert_close(program(operands(), key), eager)
