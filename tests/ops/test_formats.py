# SPDX-License-Identifier: Apache-2.0
"""Number formats: what 16 bits cost, and that no mask constant overflows them."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.ops.api import attention
from tests.ops.suite import (
    bars_for,
    check,
    normal,
    operands,
    outputs,
    outputs_and_gradients,
)
from tests.support import dense
from tests.support.tolerances import assert_close

HALVES = [jnp.bfloat16, jnp.float16]
MASKED = {
    "causal": True,
    "offset": np.array([-1, 2]),
    "key_lengths": np.array([4, 3]),
    "mask": np.array([True, True, False, True, True]),
}


@pytest.mark.parametrize("dtype", [jnp.float32, *HALVES])
@pytest.mark.parametrize("options", [MASKED, {"soft_cap": 3.0, "window": (1, 1), "offset": 1}])
def test_every_format_matches_float64(implementation, dtype, options):
    arrays = operands(dtype=dtype)
    arrays["bias"] = normal("bias", 4, 3, 5)[None].astype(dtype)
    arrays["sink_logits"] = normal("sink", 4, dtype=dtype)
    check(implementation, arrays, **options)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("times", [0.1, 5.0])
def test_large_and_small_numbers_in_16_bits(implementation, dtype, times):
    # A scale of 1/4: splash attention rounds scaled queries, which costs nothing here.
    check(implementation, operands(H=16, dtype=dtype, times=times), causal=True, offset=2)


@pytest.mark.parametrize("dtype", HALVES)
def test_num_01_masks_together_do_not_overflow(implementation, dtype):
    arrays = operands(dtype=dtype)
    lowest = float(jnp.finfo(dtype).min)
    # The caller's bias is such a mask itself; two of them, or one and a score, would be -inf.
    arrays["bias"] = np.array([0, lowest, lowest, 0, 0], np.float32).astype(dtype)
    out, _, grads = check(implementation, arrays, **MASKED)
    wide = {name: x.astype(np.float32) for name, x in arrays.items()}
    limit = 2e-2 if dtype == jnp.bfloat16 else 2e-3
    single = outputs(implementation, wide, **MASKED)[0]
    np.testing.assert_allclose(out.astype(np.float32), single, rtol=0, atol=limit)
    assert all(np.isfinite(grad.astype(np.float32)).all() for grad in grads.values())


def test_a_row_of_lowest_biases_is_still_seen(implementation):
    arrays = operands() | {"bias": np.full(5, jnp.finfo(jnp.float32).min)}
    arrays["query"][:] = 0  # every score is lost beside such a bias
    out, lse, _ = check(implementation, arrays, gradients=False)
    assert_close(out, np.broadcast_to(np.repeat(arrays["value"].mean(1), 2, 1)[:, None], out.shape))
    assert np.isfinite(lse).all()


def test_num_03_float16_with_a_blind_row(implementation):
    arrays = operands(B=1, T=8, S=8, N=2, K=1, dtype=jnp.float16)
    mask = np.ones((8, 8), bool)
    mask[3] = False
    out, _, grads = check(implementation, arrays, jit=True, causal=True, mask=mask)
    want = dense.attention(arrays, {"causal": True, "mask": mask}).out
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=2e-3)
    assert not out[:, 3].any()
    assert all(np.isfinite(grad.astype(np.float32)).all() for grad in grads.values())


def test_num_04_bfloat16_error_against_float64(implementation):
    arrays = operands(B=2, T=16, S=16, dtype=jnp.bfloat16, times=5.0)
    mask = normal("mask", 16, 16) > -1
    out, _ = outputs(implementation, arrays, jit=True, mask=mask)
    truth = dense.attention(arrays, {"mask": mask}).out
    wide = {name: x.astype(np.float32) for name, x in arrays.items()}
    best = outputs(implementation, wide, jit=True, mask=mask)[0].astype(jnp.bfloat16)
    error, least = (np.abs(x.astype(np.float64) - truth).max() for x in (out, best))
    assert least > 0 and error <= 2 * least


def test_num_06_float32_bias_beside_bfloat16(implementation):
    arrays = operands(dtype=jnp.bfloat16) | {"bias": normal("bias", 1, 4, 3, 5)}
    _, _, grads = check(implementation, arrays)
    assert grads["bias"].dtype == np.float32
    wide = {name: x.astype(np.float32) for name, x in arrays.items()}
    bars = tuple(bar.astype(np.float32) for bar in bars_for(arrays))
    single = outputs_and_gradients(implementation, wide, bars)[2]["bias"]
    np.testing.assert_allclose(grads["bias"], single, rtol=0, atol=2e-2)


def test_one_query_row_in_16_bits(implementation):
    # A single row of a 16-bit product takes another path on the CPU.
    arrays = operands(T=1, N=2, K=2, dtype=jnp.bfloat16)
    check(implementation, arrays, jit=True, causal=True, offset=np.array([2, -1]))


def test_formats_are_not_mixed_in_silence():
    arrays = operands()
    arrays["key"] = arrays["key"].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match="float32, bfloat16, float32: want one dtype for all"):
        attention(**arrays)
