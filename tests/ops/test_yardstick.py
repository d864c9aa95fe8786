# SPDX-License-Identifier: Apache-2.0
"""What the other tests measure with: the float64 attention and the comparing helper."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.suite import bars_for, normal, operands
from tests.support import dense
from tests.support.tolerances import TABLE, assert_close, tolerance

OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "offset": np.array([1, -1])},
    "window": {"window": (1, 2), "pinned": 1, "offset": 1},
    "cap": {"soft_cap": 1.5, "scale": 0.7},
    "ragged": {"key_lengths": np.array([0, 4]), "query_lengths": np.array([3, 2])},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("learned", [(), ("bias", "sink_logits")], ids=["bare", "bias-sinks"])
def test_gradients_equal_central_differences(options, learned):
    shapes = {"bias": (1, 4, 3, 5), "sink_logits": (4,)}
    arrays = operands(H=2) | {name: normal(name, *shapes[name]) for name in learned}
    arrays = {name: x.astype(np.float64) for name, x in arrays.items()}
    bars = bars_for(arrays)
    keep = np.asarray(normal("keep", 2, 4, 3, 5) > 0) * 2.0

    def loss(arrays):
        result = dense.attention(arrays, options, keep=keep)
        return np.sum(result.out * bars[0]) + np.sum(
            np.where(np.isfinite(result.lse), result.lse, 0) * bars[1]
        )

    grads = dense.attention(arrays, options, bars, keep).grads
    step = 1e-5
    for name, x in arrays.items():
        # One random direction per operand tests every entry of its gradient at once.
        direction = normal(f"direction {name}", *x.shape).astype(np.float64)
        ahead = loss(arrays | {name: x + step * direction})
        behind = loss(arrays | {name: x - step * direction})
        slope = (ahead - behind) / (2 * step)
        np.testing.assert_allclose(np.sum(grads[name] * direction), slope, rtol=1e-6, atol=1e-8)


def test_numbers_done_by_hand():
    arrays = {
        "query": np.ones((1, 2, 1, 1)),
        "key": np.array([0.0, np.log(3.0)]).reshape(1, 2, 1, 1),
        "value": np.array([4.0, 8.0]).reshape(1, 2, 1, 1),
    }
    result = dense.attention(arrays, {"causal": True})
    np.testing.assert_allclose(result.out.ravel(), [4, 7])  # weights 1, then 1/4 and 3/4
    np.testing.assert_allclose(result.lse.ravel(), [0, np.log(4)], atol=1e-15)
    result = dense.attention(arrays | {"sink_logits": np.log([4.0])})
    np.testing.assert_allclose(result.out.ravel(), [3.5, 3.5])  # (1*4 + 3*8) / (1 + 3 + 4)


def test_grouped_heads_and_segments_by_hand():
    arrays = {
        "query": np.zeros((1, 3, 4, 1)),
        "key": np.zeros((1, 3, 2, 1)),
        "value": np.arange(6.0).reshape(1, 3, 2, 1),
    }
    out = dense.attention(arrays, {"query_segments": np.array([[0, 2, 2]])}).out[0, :, :, 0]
    assert out.tolist() == [[0, 0, 0, 0], [3, 3, 4, 4], [3, 3, 4, 4]]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("got", "want"),
    [(NAN, 0), (0, NAN), (NAN, NAN), (INF, -INF), (-INF, INF), (INF, 0), (0, -INF), (NAN, INF)],
)
@pytest.mark.parametrize("dtype", list(TABLE))
def test_nan_07_helper_refuses_nan_and_unequal_infinities(got, want, dtype):
    with pytest.raises(AssertionError):
        assert_close(np.array([1.0, got]), np.array([1.0, want]), dtype=dtype)


def test_helper_accepts_equal_infinities_and_nothing_broadcast():
    assert_close(np.array([-INF, 1.0]), np.array([-INF, 1.0]))
    assert_close(np.zeros((0, 3)), np.zeros((0, 3)))
    with pytest.raises(AssertionError, match="shape"):
        assert_close(np.zeros((2, 1)), np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("dtype", "most"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2), (jnp.float16, 2e-3)]
)
def test_tolerances_stay_under_those_of_the_field(dtype, most):
    assert tolerance(dtype, terms=16) <= most
    with pytest.raises(AssertionError, match="off by"):
        assert_close(np.array([0.5, 1.0]), np.array([0.5, 1.0 + most]), dtype=dtype)


def test_tolerance_follows_the_size_of_the_numbers():
    assert_close(np.array([1e6]), np.array([1e6 + 0.5]))
    with pytest.raises(AssertionError, match="off by"):
        assert_close(np.array([1.0]), np.array([1.5]))
